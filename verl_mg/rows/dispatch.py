"""Transfer of rows from their owners to the ranks of a role, and of computed columns back to the owners.

Each row of a recipe's batch is owned by exactly one rank. A role computes a row on all ranks of one data-parallel
index. `plan` decides which rank sends what to whom; here the messages are sent as raw bytes between the ranks that
have something to exchange, over gloo. Rows are in host memory until their micro-batch is computed: NCCL would need
device memory for them while engines or other roles occupy it. The images of rows follow in a second exchange, each once
to a rank, however many rows have it.

Nothing waits in a circle: every rank first requests all that it receives, then sends the rows that it owns, then
passes on what it receives as an entry. A message has one of two tags, because rows of the sender may overtake those
that it passes on.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.batch import Batch, ColumnKind, entries_of
from verl_mg.distributed.collectives import ByteSender, all_to_all_bytes, request_bytes
from verl_mg.images import Image, RowImages, distinct_images
from verl_mg.rows.plan import ColumnPart, Delivery, RowIndex, plan_deliveries, plan_returns, whole_columns

PIECE_BYTES = 32 << 20
"""Bytes of a message, unless a single row is larger."""
PIECES_IN_FLIGHT = 4
"""Messages of PIECE_BYTES that a rank holds in addition to its own and the requested rows: 128 MiB."""
# Rows that a rank copies from its own batch at a time, which bounds the memory of the copy.
ROWS_AT_ONCE = 256
FROM_OWNER, PASSED_ON = 0, 1
"""Tags of messages from the owner and from the entry of the node: one rank may send another one both kinds."""


def gather_rows(
    batch: Batch,
    index: RowIndex,
    wanted: Sequence[Sequence[int]],
    needed: Sequence[Sequence[ColumnPart]] | None = None,
    needs_images: Sequence[bool] | None = None,
) -> Batch:
    """Transfers rows to the ranks that want them; all ranks call it together.

    `wanted` has the row numbers that each rank receives, each once, `needed` the parts of columns and `needs_images`
    whether it receives images; all are the same on every rank. The result has the rows `wanted[this rank]`, in that
    order.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    needed = needed or [whole_columns(index.schema)] * ranks
    deliveries = plan_deliveries(index, wanted, needed, device.ranks_of_a_node(ranks))
    involved = [delivery for delivery in deliveries if rank in (delivery.owner, delivery.entry, *delivery.receivers)]
    pieces = [piece for delivery in involved for piece in delivery.pieces(index, PIECE_BYTES)]
    # All receipts are requested before anything is sent, so that no two ranks wait for each other's request.
    requested = deque(_request(piece) for piece in pieces if piece.owner != rank)
    source, result = _LocalRows(batch, index), _Rows(index, wanted[rank], needed[rank])
    sender = ByteSender(PIECES_IN_FLIGHT * PIECE_BYTES)
    for piece in pieces:
        if piece.owner == rank:
            sender.make_free(piece.num_bytes)  # before `pack` allocates the message, which bounds the memory
            sender.send(source.pack(piece), piece.receivers if piece.entry == rank else [piece.entry], FROM_OWNER)
    result.copy_local(source, rank)
    # Consumes the requested pieces in the order of the plan, waits for the bytes of each, and ends with the last one.
    # Each buffer is released as soon as its rows are copied and passed on.
    while requested:
        piece, data, work = requested.popleft()
        work.wait()
        if piece.entry == rank:
            sender.send(data, piece.receivers, PASSED_ON)
        result.unpack(piece, data)
    sender.wait()
    gathered = result.batch()
    gathered.images = gather_images(batch, index, wanted, needs_images)
    return gathered


def _request(piece: Delivery) -> tuple[Delivery, Tensor, dist.Work]:
    """Starts the receipt of a piece on its entry or one of its receivers."""
    from_owner = piece.owner == piece.entry or piece.entry == dist.get_rank()
    sender, tag = (piece.owner, FROM_OWNER) if from_owner else (piece.entry, PASSED_ON)
    return piece, *request_bytes(piece.num_bytes, sender, tag)


class _LocalRows:
    def __init__(self, batch: Batch, index: RowIndex) -> None:
        self._batch, self._index = batch, index
        self._counts = cache(batch.counts)

    def entries(self, parts: Sequence[ColumnPart], rows: Sequence[int]) -> Iterator[tuple[ColumnPart, Tensor]]:
        """Yields each of the parts of rows, (entries of the rows, ...), row after row."""
        local = torch.tensor([self._index.local_row[row] for row in rows], dtype=torch.int64)
        places = _places(self._counts, local)
        for part in parts:
            values, selected = self._batch[part.name], places(self._index.schema[part.name].kind)
            if part.layers is None:
                yield part, values.index_select(0, selected)
            else:
                yield part, values[selected[:, None], torch.tensor(part.layers, dtype=torch.int64)]

    def pack(self, piece: Delivery) -> Tensor:
        """Returns the bytes of a piece: its parts one after the other, each row after row."""
        data = torch.empty(piece.num_bytes, dtype=torch.uint8)
        packed = _parts_of(piece, data, self._index)
        for (_, target), (_, values) in zip(packed, self.entries(piece.parts, piece.rows), strict=True):
            target.copy_(values)
        return data


class _Rows:
    """Rows that this rank receives, in columns of their final size."""

    def __init__(self, index: RowIndex, rows: Sequence[int], parts: Sequence[ColumnPart]) -> None:
        assert len(set(rows)) == len(rows), "a rank wants a row twice"
        self._index, self._rows, self._parts = index, rows, parts
        self._place = {row: place for place, row in enumerate(rows)}
        self._counts = cache(lambda kind: torch.tensor(_counts_of(index, kind, rows), dtype=torch.int64))
        entries = cache(lambda kind: sum(_counts_of(index, kind, rows)))
        columns = {part.name: part.schema(index.schema) for part in parts}
        self._columns = {
            name: torch.empty(entries(column.kind), *column.shape, dtype=column.dtype)
            for name, column in columns.items()
        }

    def batch(self) -> Batch:
        """Returns the rows, once all have been received."""
        received = Batch([self._index.lengths[row] for row in self._rows])
        for name, values in self._columns.items():
            received.put(name, values, self._index.schema[name].kind)
        return received

    def copy_local(self, source: _LocalRows, rank: int) -> None:
        local = [row for row in self._rows if self._index.owner_rank[row] == rank]
        for first in range(0, len(local), ROWS_AT_ONCE):
            rows = local[first : first + ROWS_AT_ONCE]
            self._fill(rows, source.entries(self._parts, rows))

    def unpack(self, piece: Delivery, data: Tensor) -> None:
        self._fill(piece.rows, _parts_of(piece, data, self._index))

    def _fill(self, rows: Sequence[int], parts: Iterable[tuple[ColumnPart, Tensor]]) -> None:
        places = _places(self._counts, torch.tensor([self._place[row] for row in rows], dtype=torch.int64))
        for part, values in parts:
            self._columns[part.name].index_copy_(0, places(self._index.schema[part.name].kind), values)


def _places(counts: Callable[[ColumnKind], Tensor], rows: Tensor) -> Callable[[ColumnKind], Tensor]:
    """Returns the function from a kind to the positions of the entries of rows in a column of it, row after row."""
    # Cached and only on demand: most rows have several token columns, and some transfers have none.
    return cache(lambda kind: rows if kind is ColumnKind.SEQUENCE else entries_of(counts(kind), rows))


def _counts_of(index: RowIndex, kind: ColumnKind, rows: Sequence[int]) -> list[int]:
    counts = index.counts(kind)
    return [counts[row] for row in rows]


def _parts_of(piece: Delivery, data: Tensor, index: RowIndex) -> Iterator[tuple[ColumnPart, Tensor]]:
    """Yields each part of a piece with its entries as a view of the piece's bytes."""
    entries = cache(lambda kind: sum(_counts_of(index, kind, piece.rows)))
    columns = [part.schema(index.schema) for part in piece.parts]
    sizes = [entries(column.kind) * column.entry_bytes for column in columns]
    for part, column, values in zip(piece.parts, columns, data.split(sizes), strict=True):
        yield part, values.view(column.dtype).view(entries(column.kind), *column.shape)


def gather_images(
    batch: Batch, index: RowIndex, wanted: Sequence[Sequence[int]], takes: Sequence[bool] | None = None
) -> list[RowImages] | None:
    """Transfers the images of rows to the ranks that want the rows; all ranks call it together.

    A rank gets the encoded bytes of an image once from each owner of rows that have it. `wanted` has the row numbers
    of each rank, `takes` whether it takes images. The result has the images of `wanted[this rank]`, in that order; None
    where no rank has images, or this one takes none.
    """
    if not index.has_images:  # known on all ranks, so that batches without images need no exchange
        return None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    takes = takes or [True] * ranks
    local = _LocalImages(batch, index)
    outgoing = [local.pack(wanted[other] if takes[other] and other != rank else ()) for other in range(ranks)]
    received = all_to_all_bytes(outgoing)
    if not takes[rank]:
        return None
    images = local.of(wanted[rank])
    for data in received:
        images |= _unpack_images(data)
    return [images[row] for row in wanted[rank]]


class _LocalImages:
    """Images of the rows that this rank owns, by their numbers in the index."""

    def __init__(self, batch: Batch, index: RowIndex) -> None:
        rows = index.rows_of(dist.get_rank())
        self._images = dict(zip(rows, batch.images or [()] * len(rows), strict=True))

    def of(self, rows: Iterable[int]) -> dict[int, RowImages]:
        return {row: self._images[row] for row in rows if row in self._images}

    def pack(self, rows: Iterable[int]) -> Tensor:
        """Returns uint8: the size of a JSON text, this text with the keys of each row, and the images one by one."""
        chosen = self.of(rows)
        images = distinct_images(chosen.values())
        keys = {row: [image.key for image in of_row] for row, of_row in chosen.items()}
        text = json.dumps({"rows": keys, "sizes": [len(image.data) for image in images.values()]}).encode()
        parts = [len(text).to_bytes(8, "little"), text, *(image.data for image in images.values())]
        return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8) if chosen else torch.empty(0).byte()


def _unpack_images(data: Tensor) -> dict[int, RowImages]:
    """Returns the images of each row that `_LocalImages.pack` has packed."""
    if not data.numel():
        return {}
    content = data.numpy().tobytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    images = {}
    for size in header["sizes"]:
        image = Image(content[start : start + size])
        images[image.key] = image
        start += size
    return {int(row): tuple(images[key] for key in keys) for row, keys in header["rows"].items()}


def scatter_column(
    name: str,
    index: RowIndex,
    computed_by: Sequence[tuple[int, Sequence[int]]],
    values: Mapping[int, Tensor],
    shape: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Sends a computed token column to the owners of the rows; all ranks call it together.

    `computed_by` has (rank, rows whose values it sends), the same on every rank and each row once; `values` are of the
    rows that this rank sends, (length, *shape) each. ValueError if no rank sends the values of a row.
    """
    rank = dist.get_rank()
    local = index.rows_of(rank)
    returns = plan_returns(index, computed_by, math.prod(shape) * dtype.itemsize)
    arriving = [part for part in returns if part.owner == rank]
    if (count := sum(len(part.rows) for part in arriving)) != len(local):
        raise ValueError(f"{name}: values of {count} of {len(local)} rows were received")
    requested = [(part, *request_bytes(part.num_bytes, part.sender)) for part in arriving if part.sender != rank]
    sender = ByteSender(PIECES_IN_FLIGHT * PIECE_BYTES)
    for part in returns:
        if part.sender == rank and part.owner != rank:
            sent = torch.cat([values[row].to(dtype) for row in part.rows])
            sender.send(sent.flatten().view(torch.uint8), [part.owner])
    lengths = [index.lengths[row] for row in local]
    column = torch.empty(sum(lengths), *shape, dtype=dtype)
    entries = dict(zip(local, column.split(lengths), strict=True))
    for part, data, work in requested:
        work.wait()
        by_row = data.view(dtype).view(-1, *shape).split([index.lengths[row] for row in part.rows])
        for row, received_values in zip(part.rows, by_row, strict=True):
            entries[row].copy_(received_values)
    for part in arriving:
        if part.sender == rank:
            for row in part.rows:
                entries[row].copy_(values[row])
    sender.wait()
    return column
