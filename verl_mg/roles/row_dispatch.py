"""Transfer of rows from their owners to the ranks of a role, and of computed columns back to the owners.

Each row of a recipe's batch is owned by exactly one rank. A role computes a row on all ranks of one data-parallel
index. Rows are sent directly from their owner to these ranks as raw bytes; no rank collects all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.batch import Batch, ColumnKind
from verl_mg.distributed.collectives import all_gather_json, all_to_all_bytes


@dataclass(frozen=True)
class ColumnSchema:
    """Type of a column and shape of its entries."""

    kind: ColumnKind
    """Whether the column has an entry for each token or for each sequence."""
    dtype: torch.dtype
    """Data type of the entries."""
    shape: tuple[int, ...]
    """Dimensions of one entry."""

    @property
    def entry_bytes(self) -> int:
        """Number of bytes of one entry."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RowIndex:
    """All rows of a batch over all ranks, numbered in the order of their sample ids; the same on every rank."""

    sample_ids: tuple[int, ...]
    """Sample id of each row, ascending."""
    owner_rank: tuple[int, ...]
    """Rank that owns each row."""
    local_row: tuple[int, ...]
    """Number of each row in the batch of its owner."""
    lengths: tuple[int, ...]
    """Tokens of each row."""
    num_scored_tokens: tuple[int, ...]
    """Tokens of each row under the loss mask, without the row's first token."""
    row_groups: tuple[tuple[int, ...], ...]
    """Rows that stay in one mini-batch and micro-batch: those with equal `pair`, otherwise one row each."""
    schema: Mapping[str, ColumnSchema] = field(default_factory=dict)
    """Columns that are transferred, by name."""

    def __len__(self) -> int:
        return len(self.sample_ids)


_Fingerprint = list[tuple[Tensor | None, int]]
_INDEXED = ("sample_id", "loss_mask", "pair")


class RowIndexer:
    """Computes the index of a batch in the first call for it, and keeps it as long as the batch exists."""

    def __init__(self) -> None:
        # With the tensors that the index was computed from and their versions.
        self._indices: WeakKeyDictionary[Batch, tuple[RowIndex, _Fingerprint]] = WeakKeyDictionary()

    def index(self, batch: Batch, transferred: Batch | None = None) -> RowIndex:
        """Returns the index of a batch; all ranks call it together.

        The index is computed again after `sample_id`, `loss_mask` or `pair` have been set or edited in place on any
        rank. Otherwise the ranks exchange only the columns' types.

        Args:
            batch: this rank's rows, with unique sample ids over all ranks.
            transferred: the same rows with the columns that will be transferred; `batch` by default.

        Returns:
            The index, with the schema of `transferred`.

        Raises:
            ValueError: two rows have the same sample id, or ranks have different columns.
        """
        cached = self._cached(batch)
        schema = _describe(batch if transferred is None else transferred)
        gathered = all_gather_json({"schema": schema, "rows": None if cached else _local_rows(batch)})
        if cached is None or any(part["rows"] is not None for part in gathered):
            local_rows = [part["rows"] for part in gathered]
            if None in local_rows:  # the batch has changed on some ranks only
                local_rows = all_gather_json(_local_rows(batch))
            cached = _merge(local_rows)
            self._indices[batch] = (cached, _fingerprint(batch))
        nonempty = set(cached.owner_rank)
        schemas = [part["schema"] for rank, part in enumerate(gathered) if rank in nonempty] or [schema]
        for other in schemas[1:]:
            if other != schemas[0]:
                raise ValueError(f"ranks have different columns: {schemas[0]} and {other}")
        return replace(cached, schema=_parse(schemas[0]))

    def _cached(self, batch: Batch) -> RowIndex | None:
        index, before = self._indices.get(batch, (None, []))
        now = _fingerprint(batch)
        unchanged = len(before) == len(now) and all(
            old is new and version == latest for (old, version), (new, latest) in zip(before, now, strict=True)
        )
        return index if unchanged else None


def _fingerprint(batch: Batch) -> _Fingerprint:
    columns = {name: batch[name] for name in _INDEXED if name in batch}
    tensors = [batch.lengths, *map(columns.get, _INDEXED)]
    return [(tensor, 0 if tensor is None else tensor._version) for tensor in tensors]


def _local_rows(batch: Batch) -> list[tuple[int, int, int, int]]:
    """Sample id, length, scored tokens and group of each row of this rank."""
    scored = (batch["loss_mask"] & (batch.positions > 0)).long()
    counts = torch.zeros(len(batch), dtype=torch.int64).index_add_(0, batch.sequence_ids, scored)
    groups = batch["pair"] if "pair" in batch else batch["sample_id"]
    columns = (batch["sample_id"], batch.lengths, counts, groups)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _merge(local_rows: Sequence[Sequence[Sequence[int]]]) -> RowIndex:
    rows = sorted(
        (sample_id, rank, local_row, length, scored, group)
        for rank, part in enumerate(local_rows)
        for local_row, (sample_id, length, scored, group) in enumerate(part)
    )
    sample_ids, owners, local, lengths, scored, groups = zip(*rows, strict=True) if rows else ((),) * 6
    if len(set(sample_ids)) != len(sample_ids):
        raise ValueError("two rows of the batch have the same sample_id")
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    return RowIndex(sample_ids, owners, local, lengths, scored, tuple(map(tuple, members.values())))


def _describe(batch: Batch) -> dict[str, list[object]]:
    return {
        name: [int(batch.kind(name)), str(batch[name].dtype).removeprefix("torch."), list(batch[name].shape[1:])]
        for name in batch.names()
    }


def _parse(schema: Mapping[str, Sequence[Any]]) -> dict[str, ColumnSchema]:
    return {
        name: ColumnSchema(ColumnKind(kind), getattr(torch, dtype), tuple(shape))
        for name, (kind, dtype, shape) in schema.items()
    }


def gather_rows(batch: Batch, index: RowIndex, wanted: Sequence[Sequence[int]]) -> Batch:
    """Transfers rows to the ranks that want them; all ranks call it together.

    Args:
        batch: this rank's rows, with the columns of `index.schema`.
        index: the index of the batch.
        wanted: row numbers of the index that each rank receives, by rank; the same on every rank.

    Returns:
        The rows `wanted[this rank]`, in that order.
    """
    rank = dist.get_rank()
    outgoing = [
        _to_bytes(batch.select([index.local_row[row] for row in rows if index.owner_rank[row] == rank]), index.schema)
        for rows in wanted
    ]
    by_owner = [[row for row in wanted[rank] if index.owner_rank[row] == r] for r in range(dist.get_world_size())]
    sizes = [_byte_count([index.lengths[row] for row in rows], index.schema) for rows in by_owner]
    received = all_to_all_bytes(outgoing, sizes)
    parts = [
        _from_bytes(data, [index.lengths[row] for row in rows], index.schema)
        for data, rows in zip(received, by_owner, strict=True)
    ]
    position = {row: i for i, row in enumerate(row for rows in by_owner for row in rows)}
    return Batch.concat(parts).select([position[row] for row in wanted[rank]])


def scatter_column(
    name: str,
    index: RowIndex,
    computed_by: Sequence[tuple[int, Sequence[int]]],
    values: Mapping[int, Tensor],
) -> Tensor:
    """Sends a computed token column to the owners of the rows; all ranks call it together.

    Args:
        name: the column's name, for messages.
        index: the index of the batch.
        computed_by: (rank, rows whose values it sends), the same list on every rank, each row once.
        values: values of the rows that this rank sends, {row: (length,)}.

    Returns:
        The float32 token column of this rank's rows.

    Raises:
        ValueError: no rank has sent the values of some row.
    """
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    senders = {sender: list(rows) for sender, rows in computed_by}
    outgoing = [
        _join([values[row] for row in senders.get(rank, []) if index.owner_rank[row] == r]).view(torch.uint8)
        for r in ranks
    ]
    incoming = [[row for row in senders.get(r, []) if index.owner_rank[row] == rank] for r in ranks]
    received = all_to_all_bytes(outgoing, [4 * sum(index.lengths[row] for row in rows) for rows in incoming])
    by_local_row: dict[int, Tensor] = {}
    for data, rows in zip(received, incoming, strict=True):
        parts = data.view(torch.float32).split([index.lengths[row] for row in rows])
        by_local_row |= {index.local_row[row]: part for row, part in zip(rows, parts, strict=True)}
    count = index.owner_rank.count(rank)
    if len(by_local_row) != count:
        raise ValueError(f"{name}: values of {len(by_local_row)} of {count} rows were received")
    return _join([by_local_row[row] for row in range(count)])


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)).float() if parts else torch.empty(0)


def _to_bytes(rows: Batch, schema: Mapping[str, ColumnSchema]) -> Tensor:
    """Columns in the schema's order, each contiguous."""
    if not len(rows):  # a rank without rows may not have the columns
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
        # A slice may not be aligned to the data type; a copy is.
        values = data[start:stop].clone().view(column.dtype).view(entries, *column.shape)
        rows.put(name, values, column.kind)
        start = stop
    return rows
