"""How a model is cut over ranks: its `Layout`, the `Coordinates` of a rank, its `Placement` in a job.

`EngineLayout` and `EnginePlacement` are the same for a rollout engine.
"""

from verl_mg.layout.dimensions import Dimensions
from verl_mg.layout.engine import EngineCoordinates, EngineLayout, EnginePlacement
from verl_mg.layout.layout import Coordinates, Layout
from verl_mg.layout.placement import Placement
from verl_mg.layout.ranks import parse_ranks, written_ranks

__all__ = [
    "Coordinates",
    "Dimensions",
    "EngineCoordinates",
    "EngineLayout",
    "EnginePlacement",
    "Layout",
    "Placement",
    "parse_ranks",
    "written_ranks",
]
