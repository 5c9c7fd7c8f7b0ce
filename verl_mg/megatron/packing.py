"""Rows into micro-batches: packed first, distributed second.

1. Rows of a mini-batch are packed into as few micro-batches as a token budget allows, a multiple of the
   data-parallel size, so that every rank runs the same number.
2. The micro-batches are dealt to the data-parallel ranks so that their predicted FLOPs are even.

Pure Python, and the same on every rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def row_cost(length: int, hidden: int) -> int:
    """Predicted FLOPs of a row, up to a factor: the matrix products grow with its length, attention with its square.

    A layer of a dense decoder takes about 24 h^2 FLOPs a token outside attention, and 2 h L inside (causal).
    """
    return length * (12 * hidden + length)


def pack(lengths: Sequence[int], ranks: int, budget: int, hidden: int) -> list[list[list[int]]]:
    """The micro-batches of each data-parallel rank, as row numbers: result[rank][micro-batch] = rows.

    A micro-batch holds at most `budget` tokens unless it is a single longer row. With fewer rows than ranks some
    micro-batches are empty; all ranks always have the same number.
    """
    micro_batches = _fill(lengths, ranks, budget)
    costs = [sum(row_cost(lengths[row], hidden) for row in rows) for rows in micro_batches]
    return [[micro_batches[i] for i in share] for share in _deal(costs, ranks)]


def _fill(lengths: Sequence[int], ranks: int, budget: int) -> list[list[int]]:
    """Rows dealt over the smallest number of bins, a multiple of `ranks`, in which the budget holds."""
    bins = _at_least(-(-sum(lengths) // budget), ranks)
    while True:
        packed = _spread(lengths, bins)
        if all(len(rows) <= 1 or sum(lengths[row] for row in rows) <= budget for rows in packed):
            return packed
        bins += ranks


def _at_least(count: int, multiple: int) -> int:
    return max(1, -(-count // multiple)) * multiple


def _spread(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Longest row first, each into the bin with the fewest tokens: even fill, and no bin much over the mean."""
    heap = [(0, number) for number in range(bins)]
    packed: list[list[int]] = [[] for _ in range(bins)]
    for row in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, number = heapq.heappop(heap)
        packed[number].append(row)
        heapq.heappush(heap, (tokens + lengths[row], number))
    return packed


def _deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Equally many items for each rank, heaviest first to the rank with the least so far."""
    each = len(costs) // ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(heap)
        shares[rank].append(item)
        if len(shares[rank]) < each:
            heapq.heappush(heap, (load + costs[item], rank))
    return shares
