"""GPG: group policy gradient (arXiv:2504.02546).

The plain policy gradient of centred rewards: no ratio, no clip, no reference, one update an iteration. Groups without
a difference have no gradient; the others are scaled up for them.
"""

import torch
from pydantic import Field
from torch import Tensor

from recipes.common import sampling
from recipes.common.penalties import regularized, scores, steered
from recipes.common.sampling import learn, roles, sample
from verl_mg.algorithms.advantages import group_relative, informative
from verl_mg.algorithms.losses import gpg_loss
from verl_mg.job.job import Job
from verl_mg.megatron.microbatch import LossInputs

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(sampling.Config):
    group_size: int = Field(8, ge=2)


def policy_loss(tokens: LossInputs, cfg: Config) -> tuple[Tensor, dict[str, Tensor]]:
    return regularized(gpg_loss(tokens.logprobs, tokens["advantages"], tokens.mask), tokens, cfg)


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    score = scores(batch, cfg)
    rows, useful = job.all_reduce_sum(torch.tensor([len(batch), informative(score, batch["group"]).sum()])).tolist()
    advantages = group_relative(score, batch["group"], normalize_std=False) * (rows / max(useful, 1))
    batch["advantages"] = batch.expand_to_tokens(advantages) * batch["loss_mask"]
    return learn(job, cfg, batch, policy_loss)
