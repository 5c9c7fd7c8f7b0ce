"""RLOO: REINFORCE leave-one-out (arXiv:2402.14740).

The baseline of a response is the mean score of the other responses to its prompt, which it has no part in: so the
gradient is unbiased. The KL penalty belongs to the score.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor

from recipes.pieces import sampling
from recipes.pieces.penalties import regularized, scores, steered
from recipes.pieces.sampling import learn, roles, sample
from verl_mg.algorithms.advantages import rloo
from verl_mg.algorithms.losses import clipped_policy_loss
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossTokens

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(sampling.Config):
    group_size: int = Field(4, ge=2)
    kl_in: Literal["loss", "reward"] = "reward"
    kl_kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k1"
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)


def policy_loss(tokens: LossTokens, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    old, advantages = tokens["old_logprobs"], tokens["advantages"]
    loss = clipped_policy_loss(tokens.logprobs, old, advantages, tokens.mask, cfg.clip_low, cfg.clip_high)
    return regularized(loss, tokens, cfg)


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    batch["advantages"] = batch.spread(rloo(scores(batch, cfg), batch["group"])) * batch["loss_mask"]
    return learn(job, cfg, batch, policy_loss, "seq-mean-token-sum")
