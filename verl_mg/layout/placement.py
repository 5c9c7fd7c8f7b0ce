"""Ranks of a job: `Placement` of a layout, and lists of ranks as text such as `0-3,8-11`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from verl_mg.errors import UserError
from verl_mg.layout.layout import Coordinates, Layout

DENSE_GROUPS = ("cp dp", "dp", "cp", "tp pp", "tp", "pp", "tp cp dp", "tp dp", "tp cp")
"""Coordinates of the dense grid that vary within a group, for each kind of group."""
EXPERT_GROUPS = ("ep", "etp", "etp ep", "etp ep pp", "edp")
"""Coordinates of the expert grid that vary within a group, for each kind of group."""


@dataclass(frozen=True)
class Placement:
    """A layout and its ranks in a job."""

    layout: Layout
    ranks: tuple[int, ...]  # global ranks: rank i of the layout is rank `ranks[i]` of the job

    def __post_init__(self) -> None:
        if len(self.ranks) != self.layout.ranks:
            raise UserError(
                f"layout {self.layout} has {self.layout.ranks} ranks, but {len(self.ranks)} are given. "
                f"Use {self.layout.ranks} ranks, or another dp."
            )
        if len(self._index) != len(self.ranks) or min(self.ranks) < 0:
            raise UserError(
                f"placement of layout {self.layout} on ranks {self.ranks}: ranks must be distinct and not negative. "
                "Name each rank once, from 0 up."
            )

    @classmethod
    def on(cls, layout: Layout, n: int) -> Placement:
        """Places a layout, its dp filled in, on ranks 0 to n - 1; raises UserError where it does not fit."""
        return cls(layout.fit(n), tuple(range(n)))

    def coordinates(self, global_rank: int) -> Coordinates | None:
        """Returns the coordinates of a rank of the job; None for a rank outside the placement."""
        index = self._index.get(global_rank)
        return None if index is None else self.layout.coordinates(index)

    @cached_property
    def _index(self) -> Mapping[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}


def parse_ranks(text: str) -> tuple[int, ...]:
    """Reads ranks in rising order, such as `0-7` or `0-3,8-11`."""
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
        if match is None:
            raise UserError(f"ranks {text!r}: {part.strip()!r} is neither a rank nor a range. Write 0-7 or 0-3,8.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or (ranks and first <= ranks[-1]):
            raise UserError(
                f"ranks {text!r}: {part.strip()!r} is not in rising order. Write each rank once, as in 0-3,8-11."
            )
        ranks += range(first, last + 1)
    return tuple(ranks)


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Formats ranks in rising order as `parse_ranks` reads them."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def group_ranks(placement: Placement, dynamic_cp: bool = False) -> list[tuple[int, ...]]:
    """Returns the ranks of each process group of a placement, rising; with `dynamic_cp` also of parts of cp."""
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
