"""Parallel layouts: the `Layout` of a model, the `Coordinates` of a rank, the `Placement` of a role in a job.

`EngineLayout`, `EngineCoordinates` and `EnginePlacement` are the same for a rollout engine. All of it is pure Python
that computes layouts of 10,000 ranks without a process.
"""

from verl_mg.layout.engine_layout import EngineCoordinates, EngineLayout, EnginePlacement
from verl_mg.layout.layout import Coordinates, Layout, ModelDims, Placement, Stage, format_ranks, parse_ranks
