"""Transfer of rows from their owners to the ranks of a role, and of computed columns back to the owners.

Each row of a recipe's batch is owned by exactly one rank. A role computes a row on all ranks of one data-parallel
index. `row_plan` decides which rank sends what to whom; here the messages are sent as raw bytes between the ranks that
have something to exchange, over gloo: rows are in host memory until their micro-batch is computed, and inside a node
gloo's loopback moves the few bytes of a stage.

Nothing waits in a circle: every rank first requests all that it receives, then sends the rows that it owns, then
passes on what it receives as an entry. A message has one of two tags, because rows of the sender may overtake those
that it passes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.batch import Batch, ColumnKind
from verl_mg.distributed.collectives import ByteSender, request_bytes
from verl_mg.roles.row_index import RowIndex
from verl_mg.roles.row_plan import ColumnPart, Delivery, plan_deliveries, plan_returns, whole_columns

PIECE_BYTES = 32 << 20
"""Bytes of a message, unless a single row is larger."""
PIECES_IN_FLIGHT = 4
"""Messages of PIECE_BYTES that a rank holds in addition to its rows and those that it has requested."""
FROM_OWNER, PASSED_ON = 0, 1
"""Tags of messages from the owner and from the entry of the node."""


def gather_rows(
    batch: Batch,
    index: RowIndex,
    wanted: Sequence[Sequence[int]],
    needed: Sequence[Sequence[ColumnPart]] | None = None,
) -> Batch:
    """Transfers rows to the ranks that want them; all ranks call it together.

    Args:
        batch: this rank's rows, with the columns of `index.schema`.
        index: the index of the batch.
        wanted: row numbers of the index that each rank receives, without repetition, by rank; the same on every rank.
        needed: parts of the columns that each rank receives, by rank; all columns by default.

    Returns:
        The rows `wanted[this rank]`, in that order, with the columns `needed[this rank]`.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    needed = needed or [whole_columns(index.schema)] * ranks
    deliveries = plan_deliveries(index, wanted, needed, device.ranks_of_a_node(ranks))
    involved = [delivery for delivery in deliveries if rank in (delivery.owner, delivery.entry, *delivery.receivers)]
    pieces = [piece for delivery in involved for piece in delivery.pieces(index, PIECE_BYTES)]
    requested = deque(_request(piece) for piece in pieces if piece.owner != rank)
    source, result = _LocalRows(batch, index), _Rows(index, wanted[rank], needed[rank])
    sender = ByteSender(PIECES_IN_FLIGHT * PIECE_BYTES)
    for piece in pieces:
        if piece.owner == rank:
            sender.make_free(piece.num_bytes)
            sender.send(source.pack(piece), piece.receivers if piece.entry == rank else [piece.entry], FROM_OWNER)
    result.copy_local(source, rank)
    while requested:  # each buffer is released as soon as its rows are copied and passed on
        piece, data, work = requested.popleft()
        work.wait()
        if piece.entry == rank:
            sender.send(data, piece.receivers, PASSED_ON)
        result.unpack(piece, data)
    sender.wait()
    return result.batch


def _request(piece: Delivery) -> tuple[Delivery, Tensor, dist.Work]:
    """Starts the receipt of a piece on its entry or one of its receivers."""
    from_owner = piece.owner == piece.entry or piece.entry == dist.get_rank()
    sender, tag = (piece.owner, FROM_OWNER) if from_owner else (piece.entry, PASSED_ON)
    return piece, *request_bytes(piece.num_bytes, sender, tag)


class _LocalRows:
    """Rows of this rank, by their numbers in the index."""

    def __init__(self, batch: Batch, index: RowIndex) -> None:
        self._batch, self._index = batch, index
        self._offsets = batch.offsets.tolist()

    def entries(self, part: ColumnPart, row: int) -> Tensor:
        """Returns the entries of a row, (length or 1, ...)."""
        local = self._index.local_row[row]
        is_token = self._index.schema[part.name].kind is ColumnKind.TOKEN
        start, stop = self._offsets[local : local + 2] if is_token else (local, local + 1)
        values = self._batch[part.name][start:stop]
        if part.layers is None:
            return values
        first, end = (part.layers[0], part.layers[-1] + 1) if part.layers else (0, 0)
        if part.layers == tuple(range(first, end)):
            return values[:, first:end]
        return values[:, list(part.layers)]

    def pack(self, piece: Delivery) -> Tensor:
        """Returns the bytes of a piece: its parts one after the other, each row after row."""
        data = torch.empty(piece.num_bytes, dtype=torch.uint8)
        for part, values, _ in _columns(piece, data, self._index):
            torch.cat([self.entries(part, row) for row in piece.rows], out=values)
        return data


class _Rows:
    """Rows that this rank receives, in columns of their final size."""

    def __init__(self, index: RowIndex, rows: Sequence[int], parts: Sequence[ColumnPart]) -> None:
        assert len(set(rows)) == len(rows), "a rank wants a row twice"
        self._index, self._rows, self._parts = index, rows, parts
        self._place = {row: place for place, row in enumerate(rows)}
        self.batch = Batch([index.lengths[row] for row in rows])
        self._offsets = self.batch.offsets.tolist()
        for part in parts:
            column = index.schema[part.name]
            entries = self.batch.total_tokens if column.kind is ColumnKind.TOKEN else len(rows)
            self.batch.put(part.name, torch.empty(entries, *part.shape(index.schema), dtype=column.dtype), column.kind)

    def _entries(self, part: ColumnPart, row: int) -> Tensor:
        place = self._place[row]
        is_token = self._index.schema[part.name].kind is ColumnKind.TOKEN
        start, stop = self._offsets[place : place + 2] if is_token else (place, place + 1)
        return self.batch[part.name][start:stop]

    def copy_local(self, source: _LocalRows, rank: int) -> None:
        """Copies the rows that this rank owns itself."""
        for row in self._rows:
            if self._index.owner_rank[row] == rank:
                for part in self._parts:
                    self._entries(part, row).copy_(source.entries(part, row))

    def unpack(self, piece: Delivery, data: Tensor) -> None:
        """Copies a received piece into the columns."""
        for part, values, lengths in _columns(piece, data, self._index):
            for row, entries in zip(piece.rows, values.split(lengths), strict=True):
                self._entries(part, row).copy_(entries)


def _columns(piece: Delivery, data: Tensor, index: RowIndex) -> Iterator[tuple[ColumnPart, Tensor, list[int]]]:
    """Yields each part of a piece, its entries as a view of the piece's bytes, and the entries of each row."""
    start = 0
    for part in piece.parts:
        column = index.schema[part.name]
        lengths = [index.lengths[row] if column.kind is ColumnKind.TOKEN else 1 for row in piece.rows]
        stop = start + sum(lengths) * part.entry_bytes(index.schema)
        yield part, data[start:stop].view(column.dtype).view(sum(lengths), *part.shape(index.schema)), lengths
        start = stop


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
    rank = dist.get_rank()
    local = index.rows_of(rank)
    returns = plan_returns(index, computed_by)
    arriving = [part for part in returns if part.owner == rank]
    if (count := sum(len(part.rows) for part in arriving)) != len(local):
        raise ValueError(f"{name}: values of {count} of {len(local)} rows were received")
    requested = [(part, *request_bytes(part.num_bytes, part.sender)) for part in arriving if part.sender != rank]
    sender = ByteSender(PIECES_IN_FLIGHT * PIECE_BYTES)
    for part in returns:
        if part.sender == rank and part.owner != rank:
            sender.send(torch.cat([values[row].float() for row in part.rows]).view(torch.uint8), [part.owner])
    lengths = [index.lengths[row] for row in local]
    column = torch.empty(sum(lengths))
    entries = dict(zip(local, column.split(lengths), strict=True))
    for part, data, work in requested:
        work.wait()
        by_row = data.view(torch.float32).split([index.lengths[row] for row in part.rows])
        for row, received_values in zip(part.rows, by_row, strict=True):
            entries[row].copy_(received_values)
    for part in arriving:
        if part.sender == rank:
            for row in part.rows:
                entries[row].copy_(values[row])
    sender.wait()
    return column
