"""PF-PPO: policy filtration in PPO (arXiv:2409.06957).

A reward model is most reliable where its score is high or low. Responses of the last `replay` iterations wait in a
buffer; each iteration trains on as many as were sampled, drawn from there by a weight of their score.
"""

from typing import Literal

import torch
from pydantic import Field, PositiveInt

from recipes import ppo
from recipes.common.penalties import steered
from recipes.common.sampling import sample, together
from recipes.ppo import add_advantages, learn_both, policy_loss, roles
from verl_mg.algorithms.advantages import select
from verl_mg.batch import Batch
from verl_mg.job.job import Job

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(ppo.Config):
    group_size: int = Field(4, ge=1)
    replay: PositiveInt = 2
    resampling: Literal["pow", "max_min", "max_random"] = "max_min"
    power: float = Field(2.0, ge=0)


def replayed(job: Job, batch: Batch, cfg: Config) -> Batch:
    """The rows of the last iterations, these ones included; the buffer forgets older ones."""
    batch["iteration"] = torch.full((len(batch),), job.iteration)
    earlier = job.state.get("replay")
    pool = together([earlier, batch] if isinstance(earlier, Batch) else [batch])
    pool = pool.select(pool["iteration"] > job.iteration - cfg.replay)
    job.state["replay"] = pool
    return pool


def drawn(job: Job, pool: Batch, count: int, cfg: Config) -> Batch:
    """`count` rows of all ranks' pools, with replacement; the same draw on every rank, each takes its own rows."""
    generator = torch.Generator().manual_seed(job.config.job.seed + job.iteration)
    ids, scores = job.all_gather_column(pool, "sample_id"), job.all_gather_column(pool, "reward")
    times = select(scores, count, cfg.resampling, cfg.power, generator).bincount(minlength=len(ids))
    own = times[torch.searchsorted(ids, pool["sample_id"])]
    return job.reassign_sample_ids(pool.select(torch.arange(len(pool)).repeat_interleave(own)))


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    fresh = sample(job, cfg)
    pool = replayed(job, fresh, cfg)
    batch = drawn(job, pool, int(job.all_reduce_sum(torch.tensor(len(fresh)))), cfg)
    add_advantages(job, batch, cfg, cfg.lam)
    return learn_both(job, cfg, batch, policy_loss)
