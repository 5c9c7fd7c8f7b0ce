"""How a model is cut over ranks: its `Layout`, the `Coordinates` of a rank, its `Placement` in a job.

`EngineLayout` and `EnginePlacement` are the same for a rollout engine.
"""

from verl_mg.layout.engine_layout import EngineCoordinates, EngineLayout, EnginePlacement
from verl_mg.layout.layout import Coordinates, Layout
from verl_mg.layout.model_dims import ModelDims
from verl_mg.layout.placement import Placement
from verl_mg.layout.ranks import format_ranks, parse_ranks

__all__ = [
    "Coordinates",
    "EngineCoordinates",
    "EngineLayout",
    "EnginePlacement",
    "Layout",
    "ModelDims",
    "Placement",
    "format_ranks",
    "parse_ranks",
]
