"""Dynamic sampling: samples until enough groups have rewards that differ (DAPO, arXiv:2503.14476)."""

from collections.abc import Sequence
from typing import Literal

import torch

from recipes.common.rows import concat_rollouts
from verl_mg.algorithms.advantages import informative
from verl_mg.batch import Batch
from verl_mg.errors import UserError
from verl_mg.job.job import Job

DynamicSampling = Literal["rounds", "streaming"]


def sample_in_rounds(job: Job, num_groups: int, group_size: int, max_rounds: int) -> tuple[Batch, dict[str, float]]:
    """Samples whole rollouts of `num_groups` prompts, each after the one before, until enough groups differ.

    Args:
        job: the job.
        num_groups: number of groups that are needed.
        group_size: number of responses to each prompt.
        max_rounds: largest number of rollouts.

    Returns:
        this rank's rows of the first groups whose rewards differ, scored; and metrics.
    """
    rounds: list[Batch] = []
    groups = torch.empty(0)
    while len(groups) < num_groups and len(rounds) < max_rounds:
        batch = job.rollout.generate(job.prompts.next_batch(num_groups), num_samples=group_size)
        batch["reward"] = job.reward.wait(batch)
        rounds.append(batch.select(informative(batch["reward"], batch["group"], batch["trajectory"])))
        groups = job.all_gather_column(concat_rollouts(rounds), "group").unique()
    groups = groups[:num_groups]
    batch = concat_rollouts(rounds)
    metrics = {"dapo/rounds": float(len(rounds)), "dapo/groups": float(len(groups))}
    return batch.select(torch.isin(batch["group"], groups)), metrics


def sample_streaming(job: Job, num_groups: int, group_size: int, max_rounds: int) -> tuple[Batch, dict[str, float]]:
    """Samples `num_groups` prompts, and another one as soon as the rewards of a group turn out not to differ.

    No engine waits for the slowest response of a round, and no group is generated that is not needed.

    Args:
        job: the job.
        num_groups: number of groups that are needed.
        group_size: number of responses to each prompt.
        max_rounds: largest number of prompts, over `num_groups`.

    Returns:
        this rank's rows of the first groups whose rewards differ, scored; and metrics.

    Raises:
        UserError: the job is deterministic, or has no rewards of single samples.
    """
    if job.config.job.deterministic:
        raise UserError(
            "algorithm.dynamic_sampling=streaming: which samples an engine computes together depends on its speed, "
            "so that a run is not bitwise repeatable. Write algorithm.dynamic_sampling=rounds or "
            "job.deterministic=false."
        )
    batch = job.rollout.generate_filtered(num_groups, group_size, _differ, max_rounds * num_groups)
    batch["reward"] = job.reward.wait(batch)
    groups = job.all_gather_column(batch, "group").unique()
    # Columns of their own, as after a selection: metrics have the rewards without what the recipe adds to them.
    return batch.select_columns(batch.names()), {"dapo/groups": float(len(groups))}


def _differ(rewards: Sequence[float]) -> bool:
    return min(rewards) < max(rewards)
