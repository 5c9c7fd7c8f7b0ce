from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import Store

from verl_mg.checkpoint.model_directory import ModelDirectories
from verl_mg.distributed.collectives import ProcessGroups
from verl_mg.phase_timer import PhaseTimer
from verl_mg.roles.concurrent import RoleExecutor
from verl_mg.rows.index import RowIndexer
from verl_mg.training.offload import OffloadManager


@dataclass(frozen=True)
class JobContext:
    """Constructor argument of every role, engine group and rollout of a job on this rank."""

    timer: PhaseTimer
    store: Store
    offload: OffloadManager
    """Decides which role or engine occupies the memory of this rank's device."""
    executor: RoleExecutor
    rows: RowIndexer
    """Indexes the rows of each batch once, whatever the number of role calls."""
    directories: ModelDirectories
    """Model directories whose headers are read once, whatever the number of roles that load them."""
    process_groups: ProcessGroups

    @classmethod
    def create(cls, store: Store, timer: PhaseTimer | None = None) -> JobContext:
        """Returns the context of one job on this rank."""
        timer = timer or PhaseTimer()
        directories, groups = ModelDirectories(), ProcessGroups()
        return cls(timer, store, OffloadManager(), RoleExecutor(timer), RowIndexer(), directories, groups)
