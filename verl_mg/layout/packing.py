"""Rows into micro-batches: packed first, distributed second.

1. Rows are packed into few micro-batches, a multiple of the data-parallel size, costliest row first, each into the
   micro-batch with the least cost that has room for its tokens.
2. Micro-batches are dealt in steps, costliest first: those of a step cost about the same, since ranks that share
   experts wait for each other in each of them, and the costliest goes to the rank with the least so far. The ranks then
   differ by no more than the micro-batches of one step do.
3. Small rows move from the busiest rank to the idlest, until that no longer evens them out.

Pure Python, and the same on every rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

EVEN = 1e-3
"""Ranks that differ by this share of their mean cost are even."""
MOVES = 8
"""Rows that are moved, at most, for each rank."""


def pack(lengths: Sequence[int], costs: Sequence[float], ranks: int, budget: int) -> list[list[list[int]]]:
    """The micro-batches of each data-parallel rank, as row numbers: result[rank][micro-batch] = rows.

    lengths (n,): tokens of a row. costs (n,): its predicted work, in any unit, such as `weights.flops.row_flops`.
    A micro-batch holds at most `budget` tokens unless it is a single longer row. All ranks have the same number of
    micro-batches; only with fewer rows than ranks are some of them empty.
    """
    micro_batches = _fill(lengths, costs, ranks, budget)
    shares = _deal(micro_batches, costs, ranks)
    _even_out(shares, lengths, costs, budget)
    return shares


def _fill(lengths: Sequence[int], costs: Sequence[float], ranks: int, budget: int) -> list[list[int]]:
    """Micro-batches of even cost, in the smallest number, a multiple of `ranks`, in which the budget holds."""
    order = sorted(range(len(lengths)), key=lambda row: (-costs[row], row))
    alone = sum(length >= budget for length in lengths)
    rest = sum(length for length in lengths if length < budget)
    count = alone + -(-rest // budget)
    count = max(1, -(-count // ranks)) * ranks
    while (packed := _spread(order, lengths, costs, count, budget)) is None:
        count += ranks
    return packed


def _spread(
    order: Iterable[int], lengths: Sequence[int], costs: Sequence[float], count: int, budget: int
) -> list[list[int]] | None:
    """Each row into the micro-batch with the least cost that has room; None where one finds no room."""
    heap = [(0.0, number) for number in range(count)]
    tokens = [0] * count
    packed: list[list[int]] = [[] for _ in range(count)]
    for row in order:
        full = []
        while heap and tokens[heap[0][1]] and tokens[heap[0][1]] + lengths[row] > budget:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, number = heap[0]
        heapq.heapreplace(heap, (cost + costs[row], number))
        packed[number].append(row)
        tokens[number] += lengths[row]
        for entry in full:
            heapq.heappush(heap, entry)
    return packed


def _deal(micro_batches: list[list[int]], costs: Sequence[float], ranks: int) -> list[list[list[int]]]:
    """Costliest first, one micro-batch for each rank and step, the costliest of a step to the rank with the least."""
    ordered = sorted(micro_batches, key=lambda rows: (-_sum(costs, rows), rows))
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for start in range(0, len(ordered), ranks):
        idlest_first = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        for rank, rows in zip(idlest_first, ordered[start : start + ranks], strict=True):
            shares[rank].append(rows)
            loads[rank] += _sum(costs, rows)
    return shares


def _even_out(shares: list[list[list[int]]], lengths: Sequence[int], costs: Sequence[float], budget: int) -> None:
    """Move rows from the rank with the most work to that with the least, while both come closer."""
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
    giver: list[list[int]],
    taker: list[list[int]],
    lengths: Sequence[int],
    costs: Sequence[float],
    budget: int,
    gap: float,
) -> int | None:
    """Move the row that best halves the gap, into the micro-batch of the same step if that has room; which it was."""
    room = [budget - _sum(lengths, rows) for rows in taker]
    widest = max(room)
    movable = [
        (abs(gap / 2 - costs[row]), row, step)
        for step, rows in enumerate(giver)
        for row in rows
        if len(rows) > 1 and 0 < costs[row] < gap and lengths[row] <= widest
    ]
    if not movable:
        return None
    _, row, step = min(movable)
    place = step if lengths[row] <= room[step] else room.index(widest)
    giver[step].remove(row)
    taker[place].append(row)
    return row


def _sum(values: Sequence[float], rows: Iterable[int]) -> float:
    return sum(values[row] for row in rows)
