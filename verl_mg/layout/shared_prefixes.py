"""Prefixes that rows share, and rows that share them together in micro-batches.

A row may repeat the first tokens of an earlier one, its parent; so the rows form trees. Samples of a prompt repeat the
prompt of the first of them, segments of an agent's sample what an earlier segment has.

    row 0    a b c d e
    row 1    a b c x y      3 tokens of row 0
    row 2    a b c x z      4 tokens of row 1, so 3 of row 0

In a micro-batch each token is computed once: rows 0, 1 and 2 compute 5, 2 and 1 tokens. Where row 1 is in another
micro-batch, row 2 shares 3 tokens with row 0; where row 0 is, rows 1 and 2 still share 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

Shared = dict[int, tuple[int, int]]
"""{row: (row of the same micro-batch, number of first tokens that it computes for the row)}."""
UNITS_OF_RANK = 4
"""Units of a rank's share of the work, at least, where joining saves less than half of it."""
RowAmount = Callable[[int, int], float]
"""(tokens of a row, how many of its first tokens another row computes) -> work or memory of the row."""


@dataclass(frozen=True)
class PrefixLinks:
    """Rows of a batch, numbered as in its index, with the prefixes that they share."""

    lengths: Sequence[int]  # (n,) tokens of each row
    # (n,) the row whose first tokens a row repeats, an earlier one; its own number where it repeats none.
    parents: Sequence[int]
    shared: Sequence[int]  # (n,) how many tokens that are

    @classmethod
    def from_columns(
        cls,
        sample_ids: Sequence[int],
        lengths: Sequence[int],
        prefix_of: Sequence[int],
        prefix_length: Sequence[int],
        prompts: Sequence[tuple[int, int]] = (),
    ) -> PrefixLinks:
        """Returns the links that columns of a batch describe, to a row whose parent is in the batch.

        Of other rows, those with equal `prompts`, (digest, tokens), are linked to the first of them; 0 tokens are none.
        """
        rows = {sample_id: row for row, sample_id in enumerate(sample_ids)}
        parents, shared = list(range(len(lengths))), [0] * len(lengths)
        for row, (sample_id, count) in enumerate(zip(prefix_of, prefix_length, strict=True)):
            parent = rows.get(sample_id, row)
            if parent < row and count > 0:
                parents[row], shared[row] = parent, min(count, lengths[row], lengths[parent])
        first: dict[tuple[int, int], int] = {}
        for row, prompt in enumerate(prompts):
            if prompt[1] and parents[row] == row and (other := first.setdefault(prompt, row)) != row:
                parents[row], shared[row] = other, prompt[1]
        return cls(lengths, parents, shared)

    @property
    def saved(self) -> float:
        """Share of all tokens that another row computes where all rows are in one micro-batch."""
        return sum(self.shared) / max(sum(self.lengths), 1)

    def ancestors(self, row: int) -> Iterator[int]:
        """Yields a row, its parent, and so on to the root of its tree."""
        yield row
        while self.parents[row] != row:
            row = self.parents[row]
            yield row

    def path(self, row: int) -> tuple[int, ...]:
        """Returns the rows from the root of its tree to a row, by which rows are sorted in the order of the trees."""
        return tuple(self.ancestors(row))[::-1]


@dataclass
class SharingRows:
    """Rows of one micro-batch, added one after the other."""

    links: PrefixLinks  # links of all rows of the batch
    shared: Shared = field(default_factory=dict)
    """First tokens that the rows share with those added before, without rows that share none."""
    _nearest: Shared = field(default_factory=dict)
    """For each row of the batch: the added row with most of its first tokens, and how many these are."""

    @classmethod
    def of(cls, links: PrefixLinks, rows: Iterable[int]) -> SharingRows:
        """Returns a micro-batch of rows."""
        added = cls(links)
        for row in rows:
            added.add(row)
        return added

    def shared_with(self, row: int) -> tuple[int, int]:
        """Returns the row that computes the last token that a further row would share, or itself, and how many."""
        # Up the tree from the row: it shares with a row that was added below an ancestor what both have of the
        # ancestor.
        other, count, limit = row, 0, self.links.lengths[row]
        for at in self.links.ancestors(row):
            if limit <= count:
                break
            candidate, most = self._nearest.get(at, (row, 0))
            if min(limit, most) > count:
                other, count = candidate, min(limit, most)
            limit = min(limit, self.links.shared[at])
        # That row may itself share the tokens with an earlier one, which computes them.
        while other in self.shared and count <= self.shared[other][1]:
            other = self.shared[other][0]
        return other, count

    def add(self, row: int, source: tuple[int, int] | None = None) -> None:
        """Adds a row to the micro-batch; `source`: what `shared_with` has returned for it."""
        other, count = source or self.shared_with(row)
        if count:
            self.shared[row] = other, count
        length = self.links.lengths[row]
        for at in self.links.ancestors(row):
            if self._nearest.get(at, (row, 0))[1] >= length:
                return  # and as much of all rows above
            self._nearest[at] = row, length
            length = min(length, self.links.shared[at])


@dataclass(frozen=True)
class Unit:
    """Rows that stay in one micro-batch."""

    rows: list[int]
    tokens: int  # tokens, as a budget counts them
    cost: float  # predicted work


def join_groups(
    groups: Sequence[Sequence[int]], links: PrefixLinks, tokens: RowAmount, cost: RowAmount, ranks: int, budget: int
) -> list[Unit]:
    """Joins groups of rows that must share a micro-batch and share prefixes with others, in the order of the trees."""
    # A unit ends at the budget. On several ranks it also ends at a part of a rank's share of the work, so that ranks
    # get equal work, unless the next group saves most of its work by joining.

    def unit(rows: Sequence[int], shared: Sequence[int]) -> Unit:
        """Returns rows with their tokens and work, of which others compute `shared` tokens each."""
        num_tokens, work = 0, 0.0
        for row, count in zip(rows, shared, strict=True):
            num_tokens += math.ceil(tokens(links.lengths[row], count))
            work += cost(links.lengths[row], count)
        return Unit(list(rows), num_tokens, work)

    work = sum(cost(links.lengths[row], links.shared[row]) for group in groups for row in group)
    limit = work / ranks / UNITS_OF_RANK if ranks > 1 else math.inf
    units: list[Unit] = []
    packed, tree = SharingRows(links), -1
    for path, group in sorted((links.path(group[0]), group) for group in groups):
        alone = unit(group, [0] * len(group))
        if path[0] == tree:
            sources = [packed.shared_with(row) for row in group]
            joining = unit(group, [count for _, count in sources])
            if _joins(units[-1], joining, alone, limit, budget):
                last = units.pop()
                units.append(Unit(last.rows + joining.rows, last.tokens + joining.tokens, last.cost + joining.cost))
                packed.add(group[0], sources[0])
                for row in group[1:]:  # which may share more with rows of the group
                    packed.add(row)
                continue
        packed, tree = SharingRows.of(links, group), path[0]
        units.append(alone)
    return units


def _joins(unit: Unit, joining: Unit, alone: Unit, limit: float, budget: int) -> bool:
    if unit.tokens + joining.tokens > budget:
        return False
    return unit.cost + joining.cost <= limit or joining.cost <= alone.cost / 2
