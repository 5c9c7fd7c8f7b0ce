"""KL-Cov: entropy kept by a KL penalty on few tokens (arXiv:2505.22617).

Entropy falls with the covariance of log-probability and advantage, and few tokens make most of it. The `fraction` of
all tokens of the iteration with the highest covariance is held back by a penalty to the old policy.
"""

from pydantic import Field
from torch import Tensor

from recipes.common import sampling
from recipes.common.penalties import regularized, scores, steered
from recipes.common.sampling import learn, roles, sample
from verl_mg.algorithms.advantages import group_relative, moments
from verl_mg.algorithms.losses import covariances, kl_cov_loss, share_count, tokens_at_least
from verl_mg.batch import Batch
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossInputs

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(sampling.Config):
    group_size: int = Field(8, ge=2)
    fraction: float = Field(2e-3, gt=0, le=1)
    penalty: float = Field(1.0, ge=0)


def policy_loss(tokens: LossInputs, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    old, advantages, penalized = tokens["old_logprobs"], tokens["advantages"], tokens["penalized"]
    loss = kl_cov_loss(tokens.logprobs, old, advantages, tokens.mask, penalized, cfg.penalty)
    return regularized(loss, tokens, cfg)


def token_covariances(job: Job, batch: Batch) -> tuple[Tensor, int]:
    """Of each token over the whole batch, and how many tokens that has."""
    mask, columns = batch["loss_mask"], (batch["old_logprobs"], batch["advantages"])
    means = [job.all_reduce_sum(moments(column, mask)) for column in columns]
    return covariances(*columns, mask, *means), int(means[0][0])


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    batch["advantages"] = (
        batch.expand_to_tokens(group_relative(scores(batch, cfg), batch["group"])) * batch["loss_mask"]
    )
    covariance, tokens = token_covariances(job, batch)
    threshold = job.global_kth_largest(covariance[batch["loss_mask"]], share_count(tokens, cfg.fraction))
    batch["penalized"] = tokens_at_least(covariance, batch["loss_mask"], threshold)
    return learn(job, cfg, batch, policy_loss)
