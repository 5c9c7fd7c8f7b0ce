"""Ranks of a job: `Placement` of a layout, and lists of ranks as text such as `0-3,8-11`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from verl_mg.errors import UserError
from verl_mg.layout.layout import Coordinates, Layout


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
    def on(cls, layout: Layout, n: int) -> "Placement":
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
