"""Moving rows from where a recipe holds them to where a role works on them, and columns back.

In a recipe each row lies on exactly one rank. A role works on a row in all ranks of one data-parallel index.
Rows travel straight from their holder to those ranks, as raw bytes; nothing passes through one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.batch import Batch, ColumnKind
from verl_mg.distributed.collectives import all_gather_json, all_to_all_bytes


@dataclass(frozen=True)
class ColumnSchema:
    """Of what a column has one entry, its type, and the dimensions after the first."""

    kind: ColumnKind
    dtype: torch.dtype
    rest: tuple[int, ...]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        return math.prod(self.rest) * self.dtype.itemsize


@dataclass(frozen=True)
class RowIndex:
    """All rows of a batch over all ranks, in the order of their sample ids: the same on every rank.

    units: the rows that go together, one each, or where the batch has the column `pair` those of a pair.
    """

    holders: tuple[int, ...]
    places: tuple[int, ...]
    lengths: tuple[int, ...]
    judged: tuple[int, ...]
    units: tuple[tuple[int, ...], ...]
    schema: Mapping[str, ColumnSchema]

    def __len__(self) -> int:
        return len(self.holders)


def build_row_index(batch: Batch) -> RowIndex:
    """Agree on who holds which row; all ranks call it together. Sample ids must be unique over the ranks."""
    judged = torch.zeros(len(batch), dtype=torch.int64).index_add_(
        0, batch.sequence_ids, (batch["loss_mask"] & (batch.positions > 0)).long()
    )
    own: dict[str, Any] = {
        "ids": batch["sample_id"].tolist(),
        "lengths": batch.lengths.tolist(),
        "judged": judged.tolist(),
        "units": (batch["pair"] if "pair" in batch else batch["sample_id"]).tolist(),
        "schema": _describe(batch),
    }
    gathered = all_gather_json(own)
    rows = sorted(
        (sample_id, rank, place, length, judged, unit)
        for rank, part in enumerate(gathered)
        for place, (sample_id, length, judged, unit) in enumerate(
            zip(part["ids"], part["lengths"], part["judged"], part["units"], strict=True)
        )
    )
    ids = [row[0] for row in rows]
    if len(set(ids)) != len(ids):
        raise ValueError("two rows of the batch have the same sample_id")
    described = next((part["schema"] for part in gathered if part["ids"]), own["schema"])
    for part in gathered:
        if part["ids"] and part["schema"] != described:
            raise ValueError(f"ranks hold different columns: {described} and {part['schema']}")
    _, holders, places, lengths, judged_counts, unit_of = zip(*rows, strict=True) if rows else ((),) * 6
    return RowIndex(holders, places, lengths, judged_counts, _gather_units(unit_of), _parse(described))


def _gather_units(unit_of: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Rows with the same unit, each unit where its first row stands."""
    units: dict[int, list[int]] = {}
    for row, unit in enumerate(unit_of):
        units.setdefault(unit, []).append(row)
    return tuple(tuple(rows) for rows in units.values())


def _describe(batch: Batch) -> dict[str, list[object]]:
    return {
        name: [int(batch.kind(name)), str(batch[name].dtype).removeprefix("torch."), list(batch[name].shape[1:])]
        for name in batch.names()
    }


def _parse(schema: Mapping[str, Sequence[object]]) -> dict[str, ColumnSchema]:
    return {
        name: ColumnSchema(ColumnKind(kind), getattr(torch, str(dtype)), tuple(rest))  # type: ignore[arg-type]
        for name, (kind, dtype, rest) in schema.items()
    }


def gather_rows(batch: Batch, index: RowIndex, wanted: Sequence[Sequence[int]]) -> Batch:
    """The rows `wanted[this rank]` (numbers in the index, in that order); `wanted[r]` is what rank r takes.

    Every rank must pass the same `wanted`.
    """
    me = dist.get_rank()
    outgoing = [
        _to_bytes(batch.select([index.places[row] for row in rows if index.holders[row] == me]), index.schema)
        for rows in wanted
    ]
    by_holder = [[row for row in wanted[me] if index.holders[row] == r] for r in range(dist.get_world_size())]
    sizes = [_byte_count([index.lengths[row] for row in rows], index.schema) for rows in by_holder]
    received = all_to_all_bytes(outgoing, sizes)
    parts = [
        _from_bytes(data, [index.lengths[row] for row in rows], index.schema)
        for data, rows in zip(received, by_holder, strict=True)
    ]
    arrived = [row for rows in by_holder for row in rows]
    place = {row: i for i, row in enumerate(arrived)}
    return Batch.concat(parts).select([place[row] for row in wanted[me]])


def scatter_column(
    name: str,
    batch: Batch,
    index: RowIndex,
    speakers: Sequence[tuple[int, Sequence[int]]],
    values: Mapping[int, Tensor],
) -> Tensor:
    """A float32 token column of `batch`, computed elsewhere.

    `speakers`: (rank, the rows it answers for), the same list on every rank, each row once; `values`: this rank's
    answers, {row: (length,)}.
    """
    me, ranks = dist.get_rank(), range(dist.get_world_size())
    answered = {rank: list(rows) for rank, rows in speakers}
    outgoing = [
        _joined([values[row] for row in answered.get(me, []) if index.holders[row] == rank]).view(torch.uint8)
        for rank in ranks
    ]
    mine = [[row for row in answered.get(rank, []) if index.holders[row] == me] for rank in ranks]
    received = all_to_all_bytes(outgoing, [4 * sum(index.lengths[row] for row in rows) for rows in mine])
    arrived: dict[int, Tensor] = {}
    for data, rows in zip(received, mine, strict=True):
        parts = data.view(torch.float32).split([index.lengths[row] for row in rows])
        arrived |= {index.places[row]: part for row, part in zip(rows, parts, strict=True)}
    if len(arrived) != len(batch):
        raise ValueError(f"{name}: {len(arrived)} of {len(batch)} rows came back")
    return _joined([arrived[place] for place in range(len(batch))])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)).float() if parts else torch.empty(0)


def _to_bytes(rows: Batch, schema: Mapping[str, ColumnSchema]) -> Tensor:
    """The columns in the schema's order, each contiguous."""
    if not len(rows):  # a rank without rows need not know the columns
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([rows[name].contiguous().view(torch.uint8).reshape(-1) for name in schema])


def _byte_count(lengths: Sequence[int], schema: Mapping[str, ColumnSchema]) -> int:
    return sum(
        column.entry_bytes * (sum(lengths) if column.kind is ColumnKind.TOKEN else len(lengths))
        for column in schema.values()
    )


def _from_bytes(data: Tensor, lengths: Sequence[int], schema: Mapping[str, ColumnSchema]) -> Batch:
    rows = Batch(torch.tensor(lengths, dtype=torch.int64))
    start = 0
    for name, column in schema.items():
        entries = sum(lengths) if column.kind is ColumnKind.TOKEN else len(lengths)
        stop = start + entries * column.entry_bytes
        # A slice need not be aligned to the type: a copy is.
        values = data[start:stop].clone().view(column.dtype).view(entries, *column.rest)
        rows.put(name, values, column.kind)
        start = stop
    return rows
