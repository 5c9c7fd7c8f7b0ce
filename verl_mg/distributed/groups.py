"""Process groups of a job: each made once for its ranks and backend, with one timeout for all."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

GROUP_TIMEOUT = timedelta(days=7)
"""Timeout of a collective. The watchdog ends a stalled job earlier and names the rank, see `RankWatchdog`."""


def new_group(ranks: Sequence[int] | None, backend: str) -> dist.ProcessGroup:
    """Creates a process group for one purpose; a collective of all ranks of the job. "nccl" is for GPUs only."""
    group: Any = dist.new_group(ranks, GROUP_TIMEOUT, backend)
    return group


class ProcessGroups:
    """The process groups of a job on this rank; all ranks of the job request the same groups in the same order.

    A request for ranks that have a group of the backend already returns that group. Collectives of two uses of a group
    run one after the other, and all ranks of a group start them in the same order.
    """

    # torch names a group by the number of calls so far, so all ranks make all calls, also for groups without them. Sets
    # that several kinds of group share are made once, for a large layout has thousands of such calls.
    def __init__(self) -> None:
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup | None] = {}

    def of(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup | None:
        """Returns the group of some ranks, None outside of it; a collective of all ranks of the job."""
        # Sorted, because torch numbers the members of a group in rising order whatever their order here.
        key = (tuple(sorted(ranks)), backend)
        if key not in self._groups:
            self._groups[key] = _create(*key)
        return self._groups[key]

    @property
    def num_joined(self) -> int:
        """Number of groups that this rank has joined, without the one of all ranks."""
        return sum(group is not None and group is not dist.group.WORLD for group in self._groups.values())


def _create(ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup | None:
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD  # has both backends
    group = new_group(ranks, backend)
    return group if dist.get_rank() in ranks else None
