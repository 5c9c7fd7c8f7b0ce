"""GRPO: group-relative policy optimisation (DeepSeekMath, arXiv:2402.03300).

Sample a group of responses to each prompt and push up the tokens of those that did better than their group's mean.
The KL term is off unless asked for.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from recipes.pieces import sampling
from recipes.pieces.penalties import regularized, scores, steered
from recipes.pieces.sampling import learn, roles, sample
from verl_mg.algorithms.advantages import group_relative
from verl_mg.algorithms.losses import clipped_policy_loss
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossTokens

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(sampling.Config):
    group_size: int = Field(8, ge=2)
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    normalize_std: bool = True
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "seq-mean-token-mean"


def policy_loss(tokens: LossTokens, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    old, advantages = tokens["old_logprobs"], tokens["advantages"]
    loss = clipped_policy_loss(tokens.logprobs, old, advantages, tokens.mask, cfg.clip_low, cfg.clip_high)
    return regularized(loss, tokens, cfg)


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    advantages = group_relative(scores(batch, cfg), batch["group"], cfg.normalize_std)
    batch["advantages"] = batch.spread(advantages) * batch["loss_mask"]
    return learn(job, cfg, batch, policy_loss, cfg.aggregation)
