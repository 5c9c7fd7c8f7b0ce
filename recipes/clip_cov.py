"""Clip-Cov: entropy kept by leaving out few tokens (arXiv:2505.22617).

As in KL-Cov, few tokens cost most of the entropy. Among those whose covariance of log-probability and advantage lies
between two bounds, so many as are a `fraction` of all tokens of the iteration are drawn, and give no gradient.
"""

from pydantic import Field
from torch import Tensor

from recipes.common import sampling
from recipes.common.penalties import regularized, scores, steered
from recipes.common.sampling import learn, roles, sample
from recipes.kl_cov import token_covariances
from verl_mg.algorithms.advantages import group_relative
from verl_mg.algorithms.losses import clip_cov_loss, priorities, share_count, tokens_at_least, tokens_between
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossInputs

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(sampling.Config):
    group_size: int = Field(8, ge=2)
    fraction: float = Field(2e-4, gt=0, le=1)
    covariance_low: float = 1.0
    covariance_high: float = 5.0
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)


def policy_loss(tokens: LossInputs, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    old, advantages, clips = tokens["old_logprobs"], tokens["advantages"], (cfg.clip_low, cfg.clip_high)
    loss = clip_cov_loss(tokens.logprobs, old, advantages, tokens.mask, tokens["cut"], *clips)
    return regularized(loss, tokens, cfg)


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    batch["advantages"] = (
        batch.expand_to_tokens(group_relative(scores(batch, cfg), batch["group"])) * batch["loss_mask"]
    )
    covariance, tokens = token_covariances(job, batch)
    candidates = tokens_between(covariance, batch["loss_mask"], cfg.covariance_low, cfg.covariance_high)
    lots = priorities(batch.expand_to_tokens(batch["sample_id"]), batch.positions, seed=job.iteration)
    threshold = job.global_kth_largest(lots[candidates], share_count(tokens, cfg.fraction))
    batch["cut"] = tokens_at_least(lots, candidates, threshold)
    return learn(job, cfg, batch, policy_loss)
