"""Rows into micro-batches: packed first, distributed second.

1. Rows are packed, costliest first, in steps of one micro-batch for each data-parallel rank: each row into the first
   step that has room, and there into the micro-batch with the least cost. So the micro-batches of a step have rows of
   the same kind and cost about the same, which counts where ranks share experts and wait for each other in every step.
2. The costliest of a step goes to the rank with the least so far. The ranks then differ by no more than the
   micro-batches of some step do.
3. Small rows move from the busiest rank to the idlest, while that evens them out.

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
    micro-batches; only in the last step are some of them empty.
    """
    shares = _deal(_fill(lengths, costs, ranks, budget), costs, ranks)
    _even_out(shares, lengths, costs, budget)
    return shares


def _fill(lengths: Sequence[int], costs: Sequence[float], ranks: int, budget: int) -> list[list[list[int]]]:
    """steps[step][micro-batch] = rows; a row goes into the first step whose least micro-batch has room for it."""
    steps: list[list[list[int]]] = []
    heaps: list[list[tuple[float, int, int]]] = []  # of each step: (cost, tokens, micro-batch)
    for row in sorted(range(len(lengths)), key=lambda row: (-costs[row], row)):
        step = next((k for k, heap in enumerate(heaps) if _fits(heap[0][1], lengths[row], budget)), len(steps))
        if step == len(steps):
            steps.append([[] for _ in range(ranks)])
            heaps.append([(0.0, 0, number) for number in range(ranks)])
        cost, tokens, number = heaps[step][0]
        heapq.heapreplace(heaps[step], (cost + costs[row], tokens + lengths[row], number))
        steps[step][number].append(row)
    return steps or [[[] for _ in range(ranks)]]


def _fits(tokens: int, length: int, budget: int) -> bool:
    return not tokens or tokens + length <= budget


def _deal(steps: list[list[list[int]]], costs: Sequence[float], ranks: int) -> list[list[list[int]]]:
    """One micro-batch of every step for each rank, the costliest to the rank with the least so far."""
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for micro_batches in steps:
        idlest_first = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        costliest_first = sorted(micro_batches, key=lambda rows: (-_sum(costs, rows), rows))
        for rank, rows in zip(idlest_first, costliest_first, strict=True):
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
