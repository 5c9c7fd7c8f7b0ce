"""Batches of several rollouts as one."""

from collections.abc import Sequence

from verl_mg.batch import Batch


def concat_rollouts(batches: Sequence[Batch]) -> Batch:
    """Returns the rows of all batches with the columns that every batch has, without the parts of the reward.

    A reward may report other parts in another call, so `reward.PART` is left out even where all batches have it.
    """
    common = set.intersection(*(set(batch.names()) for batch in batches))
    names = [name for name in sorted(common) if not name.startswith("reward.")]
    return Batch.concat([batch.select_columns(names) for batch in batches])
