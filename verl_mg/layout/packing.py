"""Rows into micro-batches: packed first, distributed over ranks second.

1. Rows are packed, costliest first, in steps of one micro-batch for each data-parallel rank: each row into the first
   step with enough free tokens, and there into the micro-batch with the least cost. So the micro-batches of a step have
   rows of similar length and cost about the same, which matters where ranks share experts and wait for each other in
   every step.
2. The costliest micro-batch of a step goes to the rank with the least cost so far. The ranks then differ by no more
   than the micro-batches of one step.
3. Small rows move from the rank with the most cost to the rank with the least, while that evens them out.

Invariants:

- every rank has the same number of micro-batches;
- each row is in exactly one micro-batch;
- a micro-batch has at most `budget` tokens, unless it is a single longer row;
- empty micro-batches occur only in the last step;
- the result is a pure function of the arguments, and the same on every rank.

    lengths and costs 8 7 4 3 2 2 of rows 0 to 5, two ranks, budget 10:

    rank 0    step 1: rows 0, 4 (10 tokens)    step 2: row 2 (4)    cost 14
    rank 1    step 1: rows 1, 3 (10 tokens)    step 2: row 5 (2)    cost 12

With context parallelism a *worker slot* is a pair (data-parallel index, context-parallel index). In each step all slots
work, and the cp slots of a data-parallel index form cp / size groups of `size` neighbours, each with other rows:

    cp4        step 1, size 4: 0 0 0 0     one long row for all four slots
               step 2, size 1: 1 2 3 4     short rows, one for each slot, without communication
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from verl_mg.layout.layout import divisors
from verl_mg.layout.shared_prefixes import Shared

EVEN = 1e-3  # ranks whose costs differ by at most this fraction of the mean count as even
MOVES = 8  # maximum number of rows that are moved in step 3, for each rank, which bounds its time


def pack(lengths: Sequence[int], costs: Sequence[float], ranks: int, budget: int) -> list[list[list[int]]]:
    """Packs rows into the micro-batches of each data-parallel rank: result[rank][micro-batch] = row numbers.

    Costs are predicted work in any unit. A micro-batch has at most `budget` tokens, or a single row.
    """
    shares = _distribute(_fill(lengths, costs, ranks, budget), costs, ranks)
    _even_out(shares, lengths, costs, budget)
    return shares


@dataclass(frozen=True)
class MicroBatchPlan:
    """Micro-batches of every worker slot, and the context-parallel size of every step."""

    rows: list[list[list[int]]]
    """Row numbers of the micro-batch rows[slot][step], with slot = dp index * cp + cp index."""
    cp_sizes: list[int]  # number of neighbouring slots that share their rows, for each step
    shared: Shared = field(default_factory=dict)
    """First tokens of rows that another row of their micro-batch computes."""

    def is_output_rank(self, slot: int, step: int) -> bool:
        """Returns whether a slot is the first of the slots that share its rows."""
        return slot % self.cp_sizes[step] == 0


def plan_evenly(lengths: Sequence[int], costs: Sequence[float], dp: int, cp: int, budget: int) -> MicroBatchPlan:
    """Plans micro-batches on which all context-parallel ranks work together."""
    packed = pack(lengths, costs, dp, budget)
    return MicroBatchPlan([packed[slot // cp] for slot in range(dp * cp)], [cp] * len(packed[0]))


def plan_by_length(lengths: Sequence[int], costs: Sequence[float], dp: int, cp: int, budget: int) -> MicroBatchPlan:
    """Plans micro-batches on as few context-parallel ranks as each row needs, longest rows first.

    `budget` is the tokens of a micro-batch on all cp ranks; `size` of them have budget * size / cp.
    """
    needed = [cp_size_for(length, cp, budget) for length in lengths]
    rows: list[list[list[int]]] = [[] for _ in range(dp * cp)]
    cp_sizes: list[int] = []
    # One size in each step, on all slots: then all ranks of a group are in the same collectives. Without rows there is
    # one step, in which all slots are idle.
    for size in sorted(set(needed) or {cp}, reverse=True):
        members = [row for row, need in enumerate(needed) if need == size]
        member_lengths, member_costs = [lengths[i] for i in members], [costs[i] for i in members]
        packed = pack(member_lengths, member_costs, dp * cp // size, budget * size // cp)  # as if groups were ranks
        for slot, steps in enumerate(rows):
            steps += [[members[i] for i in micro] for micro in packed[slot // size]]
        cp_sizes += [size] * len(packed[0])
    return MicroBatchPlan(rows, cp_sizes)


def cp_size_for(length: int, cp: int, budget: int) -> int:
    """Returns the smallest divisor of cp whose share of the budget fits a row; cp where none does."""
    return next((size for size in divisors(cp) if length <= budget * size // cp), cp)


def _fill(lengths: Sequence[int], costs: Sequence[float], ranks: int, budget: int) -> list[list[list[int]]]:
    """Returns steps[step][micro-batch] = rows; a row goes into the first step whose cheapest micro-batch fits it."""
    # Only the cheapest micro-batch of a step is tried, which evens out their costs, and is the first of its heap.
    steps: list[list[list[int]]] = []
    heaps: list[list[tuple[float, int, int]]] = []  # of each step: (cost, tokens, micro-batch)
    free = _FreeTokens()  # of the cheapest micro-batch of each step
    # Ties are broken by the number of the row, so that all ranks have the same order.
    for row in sorted(range(len(lengths)), key=lambda row: (-costs[row], row)):
        step = free.first(lengths[row])
        if step is None:
            step = len(steps)
            steps.append([[] for _ in range(ranks)])
            heaps.append([(0.0, 0, number) for number in range(ranks)])
        cost, tokens, number = heaps[step][0]
        heapq.heapreplace(heaps[step], (cost + costs[row], tokens + lengths[row], number))
        steps[step][number].append(row)
        filled = heaps[step][0][1]
        free.put(step, budget - filled if filled else math.inf)  # a longer row is a micro-batch by itself
    return steps or [[[] for _ in range(ranks)]]


class _FreeTokens:
    """Numbers of which the first that is large enough is found without looking at all: a tree of maxima.

    Numbers 3 5 1 are the leaves of the tree  5 | 5 1 | 3 5 1 -inf.  The first of at least 4: left, right.
    """

    def __init__(self) -> None:
        self._leaves = 1
        self._tree = [-math.inf] * 2  # node i has the children 2i and 2i + 1, and is their maximum

    def first(self, needed: float) -> int | None:
        """Returns the place of the first number of at least `needed`."""
        if self._tree[1] < needed:
            return None
        node = 1
        while node < self._leaves:
            node *= 2
            node += self._tree[node] < needed
        return node - self._leaves

    def put(self, place: int, number: float) -> None:
        """Sets a number; `place` is at most one beyond the last."""
        if place == self._leaves:
            numbers = self._tree[self._leaves :] + [-math.inf] * self._leaves
            self._leaves *= 2
            self._tree = [-math.inf] * self._leaves + numbers
            for node in range(self._leaves - 1, 0, -1):
                self._tree[node] = max(self._tree[2 * node : 2 * node + 2])
        node = place + self._leaves
        self._tree[node] = number
        while node > 1:
            node //= 2
            self._tree[node] = max(self._tree[2 * node], self._tree[2 * node + 1])


def _distribute(steps: list[list[list[int]]], costs: Sequence[float], ranks: int) -> list[list[list[int]]]:
    """Gives each rank one micro-batch of every step, the costliest to the rank with the least cost so far."""
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for micro_batches in steps:
        cheapest_first = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        costliest_first = sorted(micro_batches, key=lambda rows: (-_sum(costs, rows), rows))
        for rank, rows in zip(cheapest_first, costliest_first, strict=True):
            shares[rank].append(rows)
            loads[rank] += _sum(costs, rows)
    return shares


def _even_out(shares: list[list[list[int]]], lengths: Sequence[int], costs: Sequence[float], budget: int) -> None:
    """Moves rows from the rank with the most cost to the rank with the least, while the two come closer."""
    loads = [sum(_sum(costs, rows) for rows in share) for share in shares]
    mean = sum(loads) / len(loads)
    for _ in range(MOVES * len(shares)):
        busiest = max(range(len(loads)), key=lambda rank: (loads[rank], -rank))
        idlest = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        gap = loads[busiest] - loads[idlest]
        if gap <= EVEN * mean:
            return
        moved = _move(shares[busiest], shares[idlest], lengths, costs, budget, gap)
        if moved is None:
            return
        loads[busiest] -= costs[moved]
        loads[idlest] += costs[moved]


def _move(
    src: list[list[int]], dst: list[list[int]], lengths: Sequence[int], costs: Sequence[float], budget: int, gap: float
) -> int | None:
    """Moves the row that best halves the gap, into the micro-batch of the same step if it fits, and returns it."""
    # A row of the gap's cost or more would only exchange the two ranks. A micro-batch keeps its last row, because empty
    # ones occur only in the last step.
    free = [budget - _sum(lengths, rows) for rows in dst]
    most_free = max(free)
    movable = [
        (abs(gap / 2 - costs[row]), row, step)
        for step, rows in enumerate(src)
        for row in rows
        if len(rows) > 1 and 0 < costs[row] < gap and lengths[row] <= most_free
    ]
    if not movable:
        return None
    _, row, step = min(movable)
    dst_step = step if lengths[row] <= free[step] else free.index(most_free)
    src[step].remove(row)
    dst[dst_step].append(row)
    return row


def _sum(values: Sequence[float], rows: Iterable[int]) -> float:
    return sum(values[row] for row in rows)
