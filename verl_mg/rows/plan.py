"""Plan of a transfer of rows: which rank sends which columns of which rows to which ranks. Pure, without processes.

    owner                rank that has the row
      | one message      once to each node on which ranks want the same columns of the row
    entry                one of these ranks
      | one message each over loopback
    receivers            the others of them on the node

A byte enters a node once. The rows that the ranks of a node want are divided among them by bytes, so that each is the
entry for about the same share. A rank receives only the columns that it needs, and of a column that is divided by
layers only its layers. Example: rank 0 owns rows 0 and 1 of 3 and 5 tokens, rank 1 owns row 2 of 4 tokens; the only
column has 8 bytes a token. Ranks 0 and 1 are one node, ranks 2 and 3 another.

    ranks 0 and 1 want all rows    0 -> 1          rows 0, 1   64 bytes      1 -> 0          row 2   32 bytes
    ranks 2 and 3 want all rows    0 -> 2 -> 3     rows 0, 1   64 bytes      1 -> 3 -> 2     row 2   32 bytes
    computed values come back      rank 0 has computed row 0, rank 1 rows 1 and 2: only row 1 travels, 1 -> 0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from verl_mg.batch import ColumnKind
from verl_mg.rows.index import ColumnSchema, RowIndex


@dataclass(frozen=True, order=True)
class ColumnPart:
    """Column that a rank needs, whole or some layers of it."""

    name: str
    layers: tuple[int, ...] | None = None
    """Indices in the first dimension of an entry, such as (2, 3) of `routed_experts`; None for whole entries."""

    def shape(self, schema: Mapping[str, ColumnSchema]) -> tuple[int, ...]:
        """Returns the dimensions of one entry of the part."""
        whole = schema[self.name].shape
        return whole if self.layers is None else (len(self.layers), *whole[1:])

    def entry_bytes(self, schema: Mapping[str, ColumnSchema]) -> int:
        """Returns the number of bytes of one entry of the part."""
        column = schema[self.name]
        return ColumnSchema(column.kind, column.dtype, self.shape(schema)).entry_bytes


@dataclass(frozen=True)
class Delivery:
    """Rows of one owner on their way to ranks of one node that want the same parts of them."""

    owner: int
    entry: int
    """Rank of the node that gets the rows from their owner; may be the owner."""
    receivers: tuple[int, ...]
    """Ranks that get the rows from the entry."""
    rows: tuple[int, ...]
    """Row numbers of the index."""
    parts: tuple[ColumnPart, ...]
    """Parts of the columns, those with wide data types first, so that each is aligned in a message."""
    num_bytes: int

    @property
    def hops(self) -> list[tuple[int, int]]:
        """(sender, receiver) of each message; each has `num_bytes` bytes."""
        first = [] if self.entry == self.owner else [(self.owner, self.entry)]
        return first + [(self.entry, receiver) for receiver in self.receivers]

    def pieces(self, index: RowIndex, limit: int) -> Iterator[Delivery]:
        """Divides the rows into deliveries of at most `limit` bytes, or of a single longer row."""
        rows: list[int] = []
        filled = 0
        for row, size in zip(self.rows, row_bytes(index, self.rows, self.parts), strict=True):
            if rows and filled + size > limit:
                yield Delivery(self.owner, self.entry, self.receivers, tuple(rows), self.parts, filled)
                rows, filled = [], 0
            rows.append(row)
            filled += size
        yield Delivery(self.owner, self.entry, self.receivers, tuple(rows), self.parts, filled)


def whole_columns(schema: Mapping[str, ColumnSchema]) -> tuple[ColumnPart, ...]:
    """Returns all columns of a schema."""
    return tuple(ColumnPart(name) for name in schema)


def row_bytes(index: RowIndex, rows: Sequence[int], parts: Sequence[ColumnPart]) -> list[int]:
    """Returns the bytes of parts of each of `rows`, which are row numbers of the index."""
    sizes = {ColumnKind.TOKEN: 0, ColumnKind.SEQUENCE: 0, ColumnKind.UNKNOWN: 0}
    for part in parts:
        sizes[index.schema[part.name].kind] += part.entry_bytes(index.schema)
    per_token, per_row = sizes[ColumnKind.TOKEN], sizes[ColumnKind.SEQUENCE]
    return [per_token * index.lengths[row] + per_row for row in rows]


def plan_deliveries(
    index: RowIndex,
    wanted: Sequence[Sequence[int]],
    needed: Sequence[Sequence[ColumnPart]],
    ranks_per_node: int,
) -> list[Delivery]:
    """Plans the messages of a transfer, the same on every rank, without rows that only their owner wants.

    `wanted` has the row numbers and `needed` the parts of columns of each rank. Parts of one column are equal or
    disjoint. `ranks_per_node` consecutive ranks are on one node.
    """
    deliveries: list[Delivery] = []
    # Most ranks want the same rows as others: these are put in order once.
    distinct = {rows: _by_owner(index, rows) for rows in set(map(tuple, wanted))}
    for first in range(0, len(wanted), ranks_per_node):
        node = range(first, min(first + ranks_per_node, len(wanted)))
        local = {rank: distinct[tuple(wanted[rank])] for rank in node}
        for (ranks, parts), rows in _audiences(index, local, needed).items():
            deliveries += _divide(index, ranks, rows, _aligned(parts, index.schema))
    return deliveries


_Audience = tuple[tuple[int, ...], tuple[ColumnPart, ...]]
"""Ranks of a node, and the parts that all of them want of the same rows."""


def _by_owner(index: RowIndex, rows: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(rows, key=lambda row: (index.owner_rank[row], row)))


def _audiences(
    index: RowIndex, wanted: Mapping[int, tuple[int, ...]], needed: Sequence[Sequence[ColumnPart]]
) -> dict[_Audience, tuple[int, ...]]:
    """Returns the rows of each audience of a node, by owner; `wanted`: the rows of each rank of the node, by owner."""
    ranks_by_rows: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, rows in wanted.items():
        ranks_by_rows[rows].append(rank)
    audiences: dict[_Audience, tuple[int, ...]] = {}
    for ranks, rows in _wanted_together(index, ranks_by_rows):
        ranks_by_part: dict[ColumnPart, list[int]] = defaultdict(list)
        for rank in ranks:
            for part in needed[rank]:
                ranks_by_part[part].append(rank)
        parts_by_ranks: dict[tuple[int, ...], list[ColumnPart]] = defaultdict(list)
        for part, needers in ranks_by_part.items():
            parts_by_ranks[tuple(needers)].append(part)
        for members, parts in parts_by_ranks.items():
            audience = members, tuple(parts)
            both = (*audiences[audience], *rows) if audience in audiences else rows
            audiences[audience] = both if both is rows else _by_owner(index, both)
    return audiences


def _wanted_together(
    index: RowIndex, ranks_by_rows: Mapping[tuple[int, ...], list[int]]
) -> list[tuple[list[int], tuple[int, ...]]]:
    """Returns (ranks, rows that exactly these ranks want), from the ranks that want each list of rows."""
    # The usual case, of ranks that differ only in their pipeline stage: nothing is looked up row by row.
    if len(ranks_by_rows) == 1:
        return [(ranks, rows) for rows, ranks in ranks_by_rows.items()]
    takers: dict[int, list[int]] = defaultdict(list)
    for rows, ranks in ranks_by_rows.items():
        for row in rows:
            takers[row] += ranks
    rows_by_takers: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, ranks in takers.items():
        rows_by_takers[tuple(sorted(ranks))].append(row)
    return [(list(ranks), _by_owner(index, same)) for ranks, same in rows_by_takers.items()]


def _aligned(parts: Sequence[ColumnPart], schema: Mapping[str, ColumnSchema]) -> tuple[ColumnPart, ...]:
    # Wide types first: then each part begins at a multiple of its item size, and can be viewed without a copy.
    return tuple(sorted(parts, key=lambda part: (-schema[part.name].dtype.itemsize, part.name, part.layers or ())))


def _divide(
    index: RowIndex, ranks: tuple[int, ...], rows: tuple[int, ...], parts: tuple[ColumnPart, ...]
) -> Iterator[Delivery]:
    """Divides rows that all of the ranks want into as many runs of about the same bytes, one for each as the entry."""
    # The rows are in the order of their owners, so that an owner sends to few entries.
    sizes = row_bytes(index, rows, parts)
    total, before = max(sum(sizes), 1), 0
    routes: list[tuple[int, int]] = []
    for row, size in zip(rows, sizes, strict=True):
        # The run in which the middle of the row is. In integers: every rank must compute the same plan.
        run = (2 * before + size) * len(ranks) // (2 * total)
        routes.append((index.owner_rank[row], ranks[min(run, len(ranks) - 1)]))
        before += size
    for (owner, entry), same in groupby(range(len(rows)), key=routes.__getitem__):
        numbers = list(same)
        receivers = tuple(rank for rank in ranks if rank not in (owner, entry))
        if entry != owner or receivers:
            size = sum(sizes[number] for number in numbers)
            yield Delivery(owner, entry, receivers, rows[numbers[0] : numbers[-1] + 1], parts, size)


@dataclass(frozen=True)
class Return:
    """Computed values of rows on their way to the rows' owner."""

    sender: int
    owner: int
    rows: tuple[int, ...]
    num_bytes: int


def plan_returns(
    index: RowIndex, computed_by: Sequence[tuple[int, Sequence[int]]], entry_bytes: int = 4
) -> list[Return]:
    """Plans the messages that bring a computed token column to the owners of the rows, also from a rank to itself.

    `computed_by` has (rank, rows whose values it sends), `entry_bytes` are the bytes of the values of a token.
    """
    rows_by_pair: dict[tuple[int, int], list[int]] = defaultdict(list)
    for sender, rows in computed_by:
        for row in rows:
            rows_by_pair[sender, index.owner_rank[row]].append(row)
    return [
        Return(sender, owner, tuple(rows), entry_bytes * sum(index.lengths[row] for row in rows))
        for (sender, owner), rows in rows_by_pair.items()
    ]
