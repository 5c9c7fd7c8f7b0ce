"""Rows that a recipe was given, and the record of their columns at that time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from verl_mg.batch import Batch, ColumnKind
from verl_mg.training.microbatch import TEACHER_HIDDEN, TEACHER_TOP

NOT_RECORDED = frozenset({"generated_by", "score_id", TEACHER_HIDDEN, TEACHER_TOP})
"""Columns without meaning outside the processes that generated the row, or with hundreds of numbers for a token."""


@dataclass(frozen=True)
class GeneratedRows:
    """Rows of samples on this rank, and what is known of them that no column contains."""

    batch: Batch
    conversations: Mapping[int, str] = field(default_factory=dict)
    """Conversation of each trajectory of an agent as JSON, by trajectory."""


@dataclass(frozen=True)
class RolloutRecord:
    """A batch as a recipe received it, and as the recipe has left it."""

    batch: Batch
    received: Batch
    conversations: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: GeneratedRows) -> RolloutRecord:
        """Returns the record of rows that are about to be given to the recipe."""
        batch = rows.batch
        # A second batch: the recipe adds columns to the first one, and replays need only the received ones.
        record = cls(batch, Batch(batch.lengths), rows.conversations)
        for name in batch.names():
            if name not in NOT_RECORDED:
                record.add(name, batch[name], batch.kind(name))
        return record

    def add(self, name: str, values: Tensor, kind: ColumnKind) -> None:
        """Adds a column that the recipe receives."""
        # Copied, since the recipe may edit it in place. Columns with several numbers per token are large, and no recipe
        # changes them.
        self.received.put(name, values.clone() if values.dim() == 1 else values, kind)


@dataclass
class RolloutRecords:
    """The records of an iteration, written by the rollout and by the reward."""

    records: list[RolloutRecord] = field(default_factory=list)

    def clear(self) -> None:
        """Starts the records of another iteration."""
        self.records = []

    def add(self, rows: GeneratedRows) -> None:
        """Records rows that are about to be given to the recipe."""
        self.records.append(RolloutRecord.of(rows))

    def add_columns(self, batch: Batch, columns: Mapping[str, Tensor]) -> None:
        """Adds sequence columns (n,) to the record of a batch; nothing where the rollout has not returned the batch."""
        for record in self.records:
            if record.batch is batch:
                for name, values in columns.items():
                    record.add(name, values, ColumnKind.SEQUENCE)
