"""Batches of several rollouts as one, the newest groups, lengths of responses, and turns of rollouts and data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from verl_mg.batch import Batch
from verl_mg.engines.trajectory import NOT_GENERATED, without_agent
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


def sampling_metrics(
    recipe: str, rounds: int, groups: int, wanted: int, kept: str, warn: Callable[[str], None]
) -> dict[str, float]:
    """Returns the metrics of sampling until enough groups are kept, and warns where there are too few.

    Args:
        recipe: name of the recipe, which begins the names of the metrics.
        rounds: rollouts of the iteration.
        groups: groups that its update has.
        wanted: groups that it should have.
        kept: which groups are kept, for the warning.
        warn: as of the job.
    """
    if groups < wanted:
        effect = "its update has only these" if groups else "its update has no sample and leaves the policy as it is"
        warn(
            f"{groups} of {wanted} groups have {kept} after the largest number of samples, "
            f"algorithm.max_sampling_rounds; {effect}. Look at reward/mean and the recorded samples: the prompts are "
            "too easy or too hard, or the reward is wrong."
        )
    return {f"{recipe}/rounds": float(rounds), f"{recipe}/groups": float(groups)}


def concat_rollouts(batches: Sequence[Batch]) -> Batch:
    """Returns the rows of all batches with the columns that every batch has, without the parts of the reward.

    A reward may report other parts in another call, so `reward.PART` is left out even where all batches have it.
    Batches without rows do not count: a rank without samples misses columns that the others have.
    """
    batches = [batch for batch in batches if len(batch)] or batches[:1]
    common = set.intersection(*(set(batch.names()) for batch in batches))
    names = [name for name in sorted(common) if not name.startswith("reward.")]
    return Batch.concat([batch.select_columns(names) for batch in batches])


def oldest_of_newest(groups: Tensor, limit: int) -> int:
    """Returns the oldest of the newest groups, as many as have up to `limit` samples together.

    Args:
        groups: (n,) int64, the group of each sample on all ranks; newer groups have higher numbers.
        limit: largest number of samples; a newest group that is larger is kept whole.
    """
    numbers, counts = groups.unique(return_counts=True)
    kept = numbers[counts.flip(0).cumsum(0).flip(0) <= limit]
    return int(kept[0] if len(kept) else numbers[-1])


def response_lengths(batch: Batch) -> Tensor:
    """Returns (n,) the tokens of each row's sample that count against `rollout.max_new_tokens`.

    Of a response all tokens, results of tools included; of an agent the generated tokens of all segments.
    """
    if "prefix_of" not in batch:
        return batch.lengths - batch["prompt_length"]
    trajectories = batch.trajectory_index
    generated = batch.expand_to_tokens(trajectories)[batch["policy_versions"] != NOT_GENERATED]
    return torch.bincount(generated, minlength=len(batch))[trajectories]


def rows_of_groups(batch: Batch, groups: Sequence[int]) -> Batch:
    """Returns the rows of some groups.

    Args:
        batch: column `group`.
        groups: numbers of groups, without agents.
    """
    return batch.select(torch.isin(without_agent(batch["group"]), torch.tensor(groups, dtype=torch.int64)))


def one_row_of_each_sample(batch: Batch) -> Tensor:
    """Returns (n,) bool, true on the first row of each trajectory."""
    return torch.zeros(len(batch), dtype=torch.bool).index_fill_(0, batch.first_rows, True)


def is_turn_of_data(iteration: int, fraction: float, mode: str) -> bool:
    """Returns whether an iteration trains on answers of the data; such iterations are spread evenly.

    Args:
        iteration: number of the iteration, from 1.
        fraction: share of such iterations, from 0 to 1.
        mode: `rollout.mode`; UserError for a mode that generates ahead, into what may be a turn of the data.
    """
    if 0 < fraction < 1 and mode != "sync":
        raise UserError(
            f"algorithm.data_fraction={fraction}: turns of samples and data need rollout.mode=sync. Write it, or a "
            "fraction of 0 or 1."
        )
    return int(iteration * fraction) > int((iteration - 1) * fraction)
