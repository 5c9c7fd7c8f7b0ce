"""CISPO: clipped importance-sampling weights (MiniMax-M1, arXiv:2506.13585).

A clip of the surrogate silences the rare tokens that a long chain of thought turns on. Here the weight of a token is
clipped, and its gradient stays.
"""

from pydantic import Field
from torch import Tensor

from recipes.common import sampling
from recipes.common.penalties import regularized, scores, steered
from recipes.common.sampling import learn, roles, sample
from verl_mg.algorithms.advantages import group_relative
from verl_mg.algorithms.losses import cispo_loss
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossInputs

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(sampling.Config):
    group_size: int = Field(8, ge=2)
    clip_low: float = Field(1.0, gt=0, le=1)
    clip_high: float = Field(0.2, gt=0)


def policy_loss(tokens: LossInputs, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    old, advantages = tokens["old_logprobs"], tokens["advantages"]
    loss = cispo_loss(tokens.logprobs, old, advantages, tokens.mask, cfg.clip_low, cfg.clip_high)
    return regularized(loss, tokens, cfg)


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    batch["advantages"] = (
        batch.expand_to_tokens(group_relative(scores(batch, cfg), batch["group"])) * batch["loss_mask"]
    )
    return learn(job, cfg, batch, policy_loss)
