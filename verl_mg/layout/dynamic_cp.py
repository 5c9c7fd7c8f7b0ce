"""How many context-parallel ranks work on a micro-batch together: all, or as few as its rows need.

A seat is a data-parallel and a context-parallel index. In each step all seats work, and the cp seats of a
data-parallel index work in cp / context groups of `context` neighbours, each on rows of its own:

    cp4        step 1, context 4: 0 0 0 0     one long row for all four
               step 2, context 1: 1 2 3 4     short rows for each alone, which exchange nothing

Pure Python, and the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_mg.layout.packing import pack


@dataclass(frozen=True)
class MicroBatchPlan:
    """rows[seat][step]: the rows of a micro-batch, with seat = dp * cp + cp index. contexts[step]: ranks of each."""

    rows: list[list[list[int]]]
    cp_sizes: list[int]

    def is_output_rank(self, seat: int, step: int) -> bool:
        """Whether the seat is the first of those that share its rows."""
        return seat % self.cp_sizes[step] == 0


def plan_evenly(lengths: Sequence[int], costs: Sequence[float], dp: int, cp: int, budget: int) -> MicroBatchPlan:
    """All context-parallel ranks work on every micro-batch; see `pack`, of which `budget` is the same."""
    packed = pack(lengths, costs, dp, budget)
    return MicroBatchPlan([packed[seat // cp] for seat in range(dp * cp)], [cp] * len(packed[0]))


def plan_by_length(lengths: Sequence[int], costs: Sequence[float], dp: int, cp: int, budget: int) -> MicroBatchPlan:
    """A row goes to the fewest ranks, a divisor of cp, whose share of the budget holds it; longest ones first."""
    needed = [context_size_of(length, cp, budget) for length in lengths]
    rows: list[list[list[int]]] = [[] for _ in range(dp * cp)]
    cp_sizes: list[int] = []
    for context in sorted(set(needed) or {cp}, reverse=True):
        own = [row for row, need in enumerate(needed) if need == context]
        packed = pack([lengths[i] for i in own], [costs[i] for i in own], dp * cp // context, budget * context // cp)
        for seat, steps in enumerate(rows):
            steps += [[own[i] for i in micro] for micro in packed[seat // context]]
        cp_sizes += [context] * len(packed[0])
    return MicroBatchPlan(rows, cp_sizes)


def context_size_of(length: int, cp: int, budget: int) -> int:
    """The least divisor of cp whose share of the budget holds a row; cp where none does."""
    return next((c for c in range(1, cp) if cp % c == 0 and length <= budget * c // cp), cp)
