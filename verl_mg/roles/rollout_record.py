"""What a rollout handed to a recipe, as it was then and as the recipe has left it."""

from __future__ import annotations

from dataclasses import dataclass

from verl_mg.batch import Batch


@dataclass(frozen=True)
class RolloutRecord:
    """batch: the recipe's own, to which it adds columns. given: the columns of before."""

    batch: Batch
    given: Batch

    @classmethod
    def of(cls, batch: Batch) -> RolloutRecord:
        """A batch on its way to the recipe."""
        given = Batch(batch.lengths)
        for name in batch.names():
            values = batch[name]
            # A recipe may change a column in its place; what has several numbers a token is large, and nobody does.
            given.put(name, values.clone() if values.dim() == 1 else values, batch.kind(name))
        return cls(batch, given)
