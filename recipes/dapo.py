"""DAPO: decoupled clip and dynamic sampling policy optimisation (arXiv:2503.14476).

GRPO with four changes: a higher upper clip; more prompts are sampled until `prompts_per_iteration` groups have a
difference to learn from, `rounds` times at most; every token weighs the same; the score of a long response is lowered
within the last `overlong_buffer` tokens, and with `overlong_filter` those cut at the limit teach nothing.
"""

import torch
from pydantic import Field, PositiveInt

from recipes.common import clipping
from recipes.common.clipping import policy_loss
from recipes.common.penalties import scores, steered
from recipes.common.sampling import draw, judge, learn, roles, together
from verl_mg.algorithms.advantages import group_relative, informative, soft_overlong_penalty
from verl_mg.batch import Batch
from verl_mg.job.job import Job

__all__ = ["Config", "iteration", "policy_loss", "roles"]


class Config(clipping.Config):
    group_size: int = Field(16, ge=2)
    clip_high: float = Field(0.28, gt=0)
    rounds: PositiveInt = 10
    overlong_buffer: int = Field(0, ge=0)
    overlong_filter: bool = False


def sample_informative(job: Job, cfg: Config) -> tuple[Batch, dict[str, float]]:
    """Rounds of sampling until enough groups have scores that differ; the first ones of these."""
    kept: list[Batch] = []
    groups = torch.empty(0)
    while len(groups) < cfg.prompts_per_iteration and len(kept) < cfg.rounds:
        batch = draw(job, cfg)
        kept.append(batch.select(informative(batch["reward"], batch["group"])))
        groups = job.all_gather_column(together(kept), "group").unique()
    batch = together(kept)
    first = groups[: cfg.prompts_per_iteration]
    told = {"dapo/rounds": float(len(kept)), "dapo/groups": float(len(first))}
    return batch.select(torch.isin(batch["group"], first)), told


def shape(job: Job, batch: Batch, cfg: Config) -> None:
    lengths = batch.lengths - batch["prompt_length"]
    if cfg.overlong_buffer:
        limit = job.config.rollout.max_new_tokens
        batch["reward"] = batch["reward"] + soft_overlong_penalty(lengths, limit, cfg.overlong_buffer)
    if cfg.overlong_filter:
        batch["loss_mask"] = batch["loss_mask"] & ~batch.expand_to_tokens(batch["truncated"])


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch, told = sample_informative(job, cfg)
    shape(job, batch, cfg)
    judge(job, cfg, batch)
    batch["advantages"] = (
        batch.expand_to_tokens(group_relative(scores(batch, cfg), batch["group"])) * batch["loss_mask"]
    )
    return told | learn(job, cfg, batch, policy_loss)
