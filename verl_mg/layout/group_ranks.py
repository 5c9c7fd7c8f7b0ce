"""Ranks of the process groups that megatron-core makes for a placement, known without starting a process.

Each kind of group fixes some coordinates of a grid of the layout and varies the others. Many kinds have the same ranks:
with ep1 the expert groups equal groups of the dense grid, and with cp1 the groups with and without context parallelism
are equal. Each set of ranks is one group.

    tp2-cp2-dp2, 8 ranks

    tp       (0, 1) (2, 3) (4, 5) (6, 7)        cp dp    (0, 2, 4, 6) (1, 3, 5, 7)
    cp       (0, 2) (1, 3) (4, 6) (5, 7)        tp dp    (0, 1, 4, 5) (2, 3, 6, 7)
    dp       (0, 4) (1, 5) (2, 6) (3, 7)        tp cp    (0, 1, 2, 3) (4, 5, 6, 7)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from verl_mg.layout.layout import Layout
from verl_mg.layout.placement import Placement

DENSE_GROUPS = ("cp dp", "dp", "cp", "tp pp", "tp", "pp", "tp cp dp", "tp dp", "tp cp")
"""Coordinates of the dense grid that vary within a group, for each kind of group."""
EXPERT_GROUPS = ("ep", "etp", "etp ep", "etp ep pp", "edp")
"""Coordinates of the expert grid that vary within a group, for each kind of group."""


def group_ranks(placement: Placement, dynamic_cp: bool = False) -> list[tuple[int, ...]]:
    """Returns the ranks of each process group of a placement, rising, in the order in which they are made.

    With `dynamic_cp` also the groups of each number of neighbouring ranks that divides cp.
    """
    layout = placement.layout
    # A dictionary keeps the order, which must be the same on all ranks: torch names groups by the number of calls.
    sets = dict.fromkeys([*_megatron_groups(layout), *(smaller_cp_groups(layout) if dynamic_cp else ())])
    return [tuple(placement.ranks[index] for index in ranks) for ranks in sets]


def smaller_cp_groups(layout: Layout) -> Iterator[tuple[int, ...]]:
    """Yields, for each proper divisor of cp, the groups of as many neighbours, as ranks of the layout."""
    for cp_size in proper_divisors(layout.cp):
        starts = range(0, layout.cp, cp_size)
        for pp, dp, start, tp in product(range(layout.pp), range(layout.dp), starts, range(layout.tp)):
            yield tuple(layout.rank_of(tp, start + i, dp, pp) for i in range(cp_size))


def proper_divisors(number: int) -> list[int]:
    """Returns the divisors of a number that are smaller than it, in increasing order."""
    return [divisor for divisor in range(1, number) if number % divisor == 0]


def _megatron_groups(layout: Layout) -> Iterator[tuple[int, ...]]:
    dense = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    expert = {"etp": layout.etp, "ep": layout.ep, "edp": layout.edp, "pp": layout.pp}
    for grid, kinds in ((dense, DENSE_GROUPS), (expert, EXPERT_GROUPS)):
        for kind in kinds:
            yield from _slices(grid, kind.split())
    for stages in _slices(dense, ["pp"]):
        yield tuple(sorted({stages[0], stages[-1]}))  # word embeddings: the first and the last stage have them
        yield stages[:1]  # position embeddings
    yield tuple(range(layout.ranks))


def _slices(grid: dict[str, int], varying: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Yields the sets of ranks that differ only in some coordinates; the grid's first coordinate varies fastest."""
    keys = list(grid)
    strides = {key: math.prod(grid[k] for k in keys[:i]) for i, key in enumerate(keys)}

    def offsets(names: Sequence[str]) -> list[int]:
        points = product(*(range(0, grid[key] * strides[key], strides[key]) for key in reversed(names)))
        return [sum(point) for point in points]

    inside = offsets([key for key in keys if key in varying])
    for start in offsets([key for key in keys if key not in varying]):
        yield tuple(start + offset for offset in inside)
