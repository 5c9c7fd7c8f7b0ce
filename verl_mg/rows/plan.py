"""Index of a batch's rows over all ranks, and the plan of a transfer: which rank sends what of which rows to whom.

`RowIndexer` gathers the index: the owners of the rows, their lengths and the types of their columns. The plan is pure,
without processes.

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

import hashlib
import json
import math
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from verl_mg.batch import COUNTED_BY, Batch, ColumnKind
from verl_mg.distributed.collectives import all_gather_bytes
from verl_mg.layout.shared_prefixes import PrefixLinks
from verl_mg.rows.fingerprint import Fingerprint

PREFIX_COLUMNS = ("prefix_of", "prefix_length")
INDEXED_COLUMNS = (
    *("tokens", "prompt_length", "sample_id", "loss_mask", "pair", "trajectory"),
    *PREFIX_COLUMNS,
    *COUNTED_BY.values(),
)
"""Columns that the index of a batch depends on."""
_FIELDS = 9 + len(COUNTED_BY)
"""Integers that a rank sends for each row: sample id, length, scored tokens, group, trajectory, prefix_of and
prefix_length, digest and length of the prompt, and the entries of each kind in COUNTED_BY."""


_HEAD = "<q?q"


@dataclass(frozen=True)
class ColumnSchema:
    """Type of a column and shape of its entries."""

    kind: ColumnKind
    dtype: torch.dtype
    shape: tuple[int, ...]

    @cached_property
    def entry_bytes(self) -> int:
        """Number of bytes of one entry."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RowIndex:
    """All rows of a batch over all ranks, numbered in the order of their sample ids; the same on every rank.

    Example: rank 0 has samples 7 and 4, of 5 and 3 tokens, rank 1 has sample 9 of 4 tokens.

        row           0   1   2
        sample_ids    4   7   9
        owner_rank    0   0   1
        local_row     1   0   0
        lengths       3   5   4
    """

    sample_ids: tuple[int, ...]
    """Sample id of each row, ascending."""
    owner_rank: tuple[int, ...]
    local_row: tuple[int, ...]
    """Number of each row in the batch of its owner."""
    lengths: tuple[int, ...]
    num_scored_tokens: tuple[int, ...]
    """Tokens of each row under the loss mask, without the row's first token, which nothing predicts."""
    row_groups: tuple[tuple[int, ...], ...]
    """Rows that stay in one mini-batch and micro-batch: rows with equal `pair`, otherwise one row each."""
    schema: Mapping[str, ColumnSchema] = field(default_factory=dict)
    """Columns that are transferred, by name."""
    trajectories: tuple[int, ...] = ()
    """Trajectory of each row; its sample id where the batch has no trajectories."""
    has_images: bool = False
    """Whether rows have images, on some rank."""
    links: PrefixLinks = field(default_factory=lambda: PrefixLinks((), (), ()))
    """Prefixes that the rows share."""
    counted: Mapping[ColumnKind, tuple[int, ...]] = field(default_factory=dict)
    """Entries of each row in a column of a kind in COUNTED_BY; none where there is no such column."""

    def __len__(self) -> int:
        return len(self.sample_ids)

    def counts(self, kind: ColumnKind) -> Sequence[int]:
        """Returns the number of entries of each row in a column of a kind, as of `Batch`."""
        if kind is ColumnKind.TOKEN:
            return self.lengths
        return self.counted.get(kind, [int(kind not in COUNTED_BY)] * len(self))

    @property
    def row_groups_by_trajectory(self) -> list[list[tuple[int, ...]]]:
        """Returns the row groups of each trajectory, which stay in one mini-batch, in the order of their first rows."""
        groups: dict[int, list[tuple[int, ...]]] = {}
        for group in self.row_groups:
            groups.setdefault(self.trajectories[group[0]], []).append(group)
        return list(groups.values())

    @property
    def trajectory_tokens(self) -> list[int]:
        """Returns the scored tokens of each row's trajectory."""
        totals: Counter[int] = Counter()
        for trajectory, count in zip(self.trajectories, self.num_scored_tokens, strict=True):
            totals[trajectory] += count
        return [totals[trajectory] for trajectory in self.trajectories]

    def rows_of(self, rank: int) -> list[int]:
        """Returns the numbers of the rows that a rank owns, in the order of its batch."""
        rows = [row for row, owner in enumerate(self.owner_rank) if owner == rank]
        return sorted(rows, key=self.local_row.__getitem__)


@dataclass(frozen=True)
class _Report:
    """Contribution of one rank to the index."""

    rows: Tensor | None
    """(n, fields) int64, see `_FIELDS`; None where the rank has kept the index."""
    schema: bytes
    has_images: bool

    def encode(self) -> Tensor:
        """Returns the report as uint8: the number of rows or -1, whether there are images, the size of the compressed
        rows, these, and the schema."""
        # Most bytes of the rows are 0: compressed, the rows of a small batch fit into the first message.
        count, rows = (
            (-1, b"") if self.rows is None else (len(self.rows), zlib.compress(self.rows.numpy().tobytes(), 1))
        )
        head = struct.pack(_HEAD, count, self.has_images, len(rows))
        return torch.frombuffer(bytearray(head + rows + self.schema), dtype=torch.uint8)

    @classmethod
    def decode(cls, data: Tensor) -> _Report:
        content = data.numpy().tobytes()
        count, has_images, size = struct.unpack_from(_HEAD, content)
        start = struct.calcsize(_HEAD)
        rows = None
        if count >= 0:
            numbers = bytearray(zlib.decompress(content[start : start + size]))
            rows = torch.frombuffer(numbers, dtype=torch.int64) if count else torch.empty(0, dtype=torch.int64)
            rows = rows.view(count, _FIELDS)
        return cls(rows, content[start + size :], has_images)


class RowIndexer:
    """Computes the index of a batch in the first call for it, and keeps it as long as the batch exists."""

    def __init__(self) -> None:
        # With the tensors that the index was computed from and their versions.
        self._indices: WeakKeyDictionary[Batch, tuple[RowIndex, Fingerprint]] = WeakKeyDictionary()

    def index(self, batch: Batch, transferred: Batch | None = None) -> RowIndex:
        """Returns the index of a batch; all ranks call it together.

        The schema is of `transferred`, the same rows with the columns that will be transferred. ValueError if two rows
        have the same sample id, or ranks other columns.
        """
        # Ranks exchange only the columns' types unless one of INDEXED_COLUMNS has been set or edited in place on any of
        # them.
        cached = self._cached(batch)
        schema, has_images = _describe(batch if transferred is None else transferred), bool(batch.images)
        reports = _gather(_Report(None if cached else _local_rows(batch), schema, has_images))
        if cached is None or any(report.rows is not None for report in reports):
            if any(report.rows is None for report in reports):  # the batch has changed on some ranks only
                reports = _gather(_Report(_local_rows(batch), schema, has_images))
            cached = _merge([report.rows for report in reports if report.rows is not None])
            self._indices[batch] = (cached, Fingerprint(batch, INDEXED_COLUMNS))
        has_images = any(report.has_images for report in reports)
        # A rank without rows may have fewer columns, or columns of other types; it sends nothing.
        nonempty = sorted(set(cached.owner_rank))
        schemas = sorted({reports[rank].schema for rank in nonempty}) or [schema]
        if len(schemas) > 1:
            raise ValueError(f"ranks have different columns: {schemas[0].decode()} and {schemas[1].decode()}")
        return replace(cached, schema=_parse(json.loads(schemas[0])), has_images=has_images)

    def put(self, batch: Batch, index: RowIndex, rows_of: Sequence[Sequence[int]]) -> None:
        """Sets the index of a batch whose rows were moved, on all ranks and without communication.

        `rows_of` has the row numbers of each rank, in the order of its new batch, each row once.
        """
        places = {row: (rank, local) for rank, rows in enumerate(rows_of) for local, row in enumerate(rows)}
        owners, local_rows = zip(*(places[row] for row in range(len(index))), strict=True) if places else ((), ())
        moved = replace(index, owner_rank=owners, local_row=local_rows)
        self._indices[batch] = (moved, Fingerprint(batch, INDEXED_COLUMNS))

    def _cached(self, batch: Batch) -> RowIndex | None:
        index, before = self._indices.get(batch, (None, None))
        return index if before == Fingerprint(batch, INDEXED_COLUMNS) else None


def _gather(report: _Report) -> list[_Report]:
    return [_Report.decode(data) for data in all_gather_bytes(report.encode())]


def _local_rows(batch: Batch) -> Tensor:
    """Returns the integers of each row of this rank, (n, fields) int64, see `_FIELDS`."""
    scored = (batch["loss_mask"] & (batch.positions > 0)).long()
    counts = torch.zeros(len(batch), dtype=torch.int64).index_add_(0, batch.sequence_ids, scored)
    ids = batch["sample_id"]
    groups, trajectories = (batch[name if name in batch else "sample_id"] for name in ("pair", "trajectory"))
    # A rank without rows may have a column with another data type.
    prefixes = [batch[name] if name in batch else torch.zeros_like(ids) for name in PREFIX_COLUMNS]
    of_prompts = _prompts(batch).unbind(1)
    columns = (ids, batch.lengths, counts, groups, trajectories, *prefixes, *of_prompts, *map(batch.counts, COUNTED_BY))
    return torch.stack([column.long() for column in columns], dim=1)


def _prompts(batch: Batch) -> Tensor:
    """Returns (n, 2) int64, a digest of the prompt of each row and its tokens; 0 and 0 where it cannot be shared."""
    prompts = torch.zeros(len(batch), 2, dtype=torch.int64)
    if "prompt_length" not in batch or batch.images:  # pictures are not in the tokens
        return prompts
    tokens, starts = batch["tokens"].numpy(), (batch.lengths.cumsum(0) - batch.lengths).tolist()
    # The last token of a row is its own, so that every row computes one.
    lengths = torch.minimum(batch["prompt_length"], batch.lengths - 1)
    for row, (start, length) in enumerate(zip(starts, lengths.tolist(), strict=True)):
        digest = hashlib.blake2b(tokens[start : start + length].tobytes(), digest_size=8).digest()
        prompts[row, 0] = int.from_bytes(digest, signed=True)
    prompts[:, 1] = lengths
    return prompts


def _merge(by_rank: Sequence[Tensor]) -> RowIndex:
    """Merges the rows of all ranks, in rank order."""
    rows = torch.cat(list(by_rank))
    sizes = torch.tensor([len(part) for part in by_rank])
    owners = torch.repeat_interleave(torch.arange(len(by_rank)), sizes)
    local = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes)[owners]
    order = rows[:, 0].argsort()
    fields = (tuple(column.tolist()) for column in rows[order].unbind(1))
    sample_ids, lengths, scored, groups, trajectories, prefix_of, prefix_length, digests, prompts, *counted = fields
    if len(set(sample_ids)) != len(sample_ids):
        raise ValueError("two rows of the batch have the same sample_id")
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    owner_rank, local_row = tuple(owners[order].tolist()), tuple(local[order].tolist())
    row_groups = tuple(map(tuple, members.values()))
    return RowIndex(
        sample_ids,
        owner_rank,
        local_row,
        lengths,
        scored,
        row_groups,
        trajectories=trajectories,
        links=PrefixLinks.from_columns(
            sample_ids, lengths, prefix_of, prefix_length, tuple(zip(digests, prompts, strict=True))
        ),
        counted=dict(zip(COUNTED_BY, counted, strict=True)),
    )


def _describe(batch: Batch) -> bytes:
    """Returns the types of the columns as JSON, the same text for the same types, so that texts can be compared."""
    schema = {
        name: [int(batch.kind(name)), str(batch[name].dtype).removeprefix("torch."), list(batch[name].shape[1:])]
        for name in batch.names()
    }
    return json.dumps(schema).encode()


def _parse(schema: Mapping[str, Sequence[Any]]) -> dict[str, ColumnSchema]:
    return {
        name: ColumnSchema(ColumnKind(kind), getattr(torch, dtype), tuple(shape))
        for name, (kind, dtype, shape) in schema.items()
    }


@dataclass(frozen=True, order=True)
class ColumnPart:
    """Column that a rank needs, whole or some layers of it."""

    name: str
    layers: tuple[int, ...] | None = None
    """Indices in the first dimension of an entry, such as (2, 3) of `routed_experts`; None for whole entries."""

    def schema(self, columns: Mapping[str, ColumnSchema]) -> ColumnSchema:
        """Returns the type and the shape of the part, from the schema of whole columns."""
        whole = columns[self.name]
        return whole if self.layers is None else replace(whole, shape=(len(self.layers), *whole.shape[1:]))


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
        if self.num_bytes <= limit:
            yield self
            return
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
    sizes: Counter[ColumnKind] = Counter()
    for part in parts:
        column = part.schema(index.schema)
        sizes[column.kind] += column.entry_bytes
    # Not by the numbers of all rows for each call, of which a large job has one for each pair of ranks.
    fixed = sum(size for kind, size in sizes.items() if kind is not ColumnKind.TOKEN and kind not in COUNTED_BY)
    of_rows = [fixed] * len(rows)
    for kind, counts in {ColumnKind.TOKEN: index.lengths, **index.counted}.items():
        if size := sizes[kind]:
            of_rows = [before + size * counts[row] for before, row in zip(of_rows, rows, strict=True)]
    return of_rows


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
