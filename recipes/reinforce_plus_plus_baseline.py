"""REINFORCE++ with baseline (arXiv:2501.03262).

A response's score less its group's mean, whitened over the whole batch instead of over the few of its group; the KL
penalty, k2, stands in the loss.
"""

from typing import Literal

from pydantic import Field

from recipes.common import clipping
from recipes.common.clipping import policy_loss
from recipes.common.penalties import scores, steered
from recipes.common.sampling import learn, roles, sample
from verl_mg.algorithms.advantages import group_relative, moments, whiten
from verl_mg.job.job import Job

__all__ = ["Config", "iteration", "roles"]


class Config(clipping.Config):
    group_size: int = Field(8, ge=2)
    kl_kind: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] = "k2"


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch, mask = sample(job, cfg), "loss_mask"
    centred = batch.expand_to_tokens(group_relative(scores(batch, cfg), batch["group"], normalize_std=False))
    batch["advantages"] = whiten(centred, batch[mask], job.all_reduce_sum(moments(centred, batch[mask])))
    return learn(job, cfg, batch, policy_loss)
