"""Joining the ranks of the job, and leaving together, at its end or because of an error."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, rendezvous

from verl_mg import device
from verl_mg.config import JobConfig
from verl_mg.distributed import mpi
from verl_mg.distributed.rendezvous import wait_for_fresh_store
from verl_mg.distributed.signals import Signals
from verl_mg.distributed.watchdog import RankWatchdog
from verl_mg.errors import EXIT_CODE, UserError
from verl_mg.phase_timer import PhaseTimer


@dataclass(frozen=True)
class World:
    """This process among the ranks. watch: over the other ranks, where there are any."""

    rank: int
    size: int
    store: Store
    signals: Signals = field(default_factory=Signals)
    watch: RankWatchdog | None = None

    @classmethod
    def join(cls) -> World:
        """Meet the ranks that torchrun or MPI started, or be the only one; the default process group exists afterwards.

        Raises:
            UserError: MPI started the ranks and cannot be asked, see `mpi.join`.
        """
        signals = Signals()
        if "RANK" in os.environ:
            store, rank, size = next(rendezvous("env://"))
            store = wait_for_fresh_store(store, rank, size)
        elif mpi.among_others():
            store, rank, size = mpi.join()
        else:
            store, rank, size = HashStore(), 0, 1
        watch = RankWatchdog(rank, size, store, lambda: signals.asked) if size > 1 else None
        if torch.cuda.is_available():
            torch.cuda.set_device(device.current_device())
        else:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local))
        dist.init_process_group(device.backend(), store=PrefixStore("job", store), rank=rank, world_size=size)
        return cls(rank, size, store, signals, watch)

    def limit(self, job: JobConfig) -> None:
        """How long ranks may be silent and stand still, from here on."""
        if self.watch:
            self.watch.limit(job.heartbeat_timeout_s, job.stall_timeout_s)

    def watch_progress(self, timer: PhaseTimer) -> None:
        """A rank goes on as long as its clock ticks."""
        if self.watch:
            self.watch.watch_progress(lambda: timer.progress)

    def leave(self) -> None:
        """The regular end: all ranks together."""
        dist.barrier()
        if self.watch:
            self.watch.stop()
        dist.destroy_process_group()

    def leave_with(self, error: UserError) -> NoReturn:
        """End all ranks with code 2; the first rank to come here prints the error."""
        if self.watch:
            self.watch.end(EXIT_CODE, f"error: {error}")
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)

    def fail(self, error: Exception) -> NoReturn:
        """End all ranks with code 1 and the traceback of the one that failed, or as a lost rank wants it."""
        if self.watch:
            self.watch.fail(error)
        raise error
