"""`Placement`: which ranks of a job a layout stands on."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from verl_mg.errors import UserError
from verl_mg.layout.layout import Coordinates, Layout


@dataclass(frozen=True)
class Placement:
    """A layout and its ranks: rank i of `layout` is rank `ranks[i]` of the job."""

    layout: Layout
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.layout.ranks:
            raise UserError(
                f"layout {self.layout} stands on {self.layout.ranks} ranks, not on {len(self.ranks)}: "
                f"give it {self.layout.ranks}, or another dp"
            )
        if len(self._index) != len(self.ranks) or min(self.ranks) < 0:
            raise UserError(f"placement of layout {self.layout}: name each rank once, from 0 up, not {self.ranks}")

    @classmethod
    def on(cls, layout: Layout, n: int) -> "Placement":
        """`layout`, its dp filled in, on ranks 0 to n - 1. Raises UserError when it does not fit."""
        return cls(layout.fit(n), tuple(range(n)))

    def coordinates(self, global_rank: int) -> Coordinates | None:
        """Where a rank of the job stands in the layout, or None when it holds no part of it."""
        index = self._index.get(global_rank)
        return None if index is None else self.layout.coordinates(index)

    @cached_property
    def _index(self) -> Mapping[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}
