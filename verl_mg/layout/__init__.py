"""How a model is cut over ranks: its `Layout`, the `Coordinates` of a rank, its `Placement` in a job."""

from verl_mg.layout.layout import Coordinates, Layout
from verl_mg.layout.placement import Placement

__all__ = ["Coordinates", "Layout", "Placement"]
