"""The ranks of a job: joining them, and ending all of them together, regularly or because of an error.

join:  store (torchrun or MPI) -> watchdog -> default process group, on GPUs with NCCL's communicator of all ranks
end:   `shut_down`, or all ranks by the watchdog: `exit_with_user_error` (2), `abort` (1), a lost rank (3)
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo, Store, distributed_c10d, rendezvous

from verl_mg import device
from verl_mg.config import JobConfig
from verl_mg.distributed.collectives import GROUP_TIMEOUT
from verl_mg.distributed.launcher import ITERATION, Launcher
from verl_mg.distributed.rendezvous import join_mpi, raise_open_files_limit, started_by_mpi, wait_for_fresh_store
from verl_mg.distributed.signals import Signals
from verl_mg.distributed.watchdog import RankWatchdog
from verl_mg.errors import EXIT_CODE, UserError
from verl_mg.phase_timer import PhaseTimer

THREADS = 2  # threads of a group that run its collectives; torch's default for one device


@dataclass(frozen=True)
class World:
    """This process as one of the ranks of a job."""

    rank: int
    size: int
    store: Store  # key-value store that all ranks share
    signals: Signals = field(default_factory=Signals)  # stop requests that this process received
    # Watchdog over the other ranks; None in a job of one rank.
    watchdog: RankWatchdog | None = None

    @classmethod
    def join(cls) -> World:
        """Joins the ranks that torchrun or MPI started, and initializes the default process group."""
        device.set_default_variables()
        device.keep_freed_memory()
        signals = Signals()
        raise_open_files_limit()
        if "RANK" in os.environ:
            store, rank, size = next(rendezvous("env://"))
            store = wait_for_fresh_store(store, rank, size)
        elif started_by_mpi():
            store, rank, size = join_mpi()
        else:
            store, rank, size = HashStore(), 0, 1
        # Before the process group, in whose creation a rank may already be lost or stall.
        watchdog = RankWatchdog(rank, size, store, lambda: signals.stop_requested) if size > 1 else None
        # With GPUs too: Adam with moments in host memory computes there, and the launcher sets OMP_NUM_THREADS=1.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        # gloo connects all pairs of a group when it is created. TORCH_GLOO_LAZY_INIT=1 would connect them at the first
        # message, but three ranks of torch 2.13 hang in their first collectives with it, with and without the shared
        # event loop. So it stays off, and `raise_open_files_limit` raises the limit instead.
        share_event_loop()
        init_process_group(PrefixStore("job", store), rank, size)
        return cls(rank, size, store, signals, watchdog)

    def set_timeouts(self, job: JobConfig) -> None:
        """Sets the timeouts of the watchdog, where there is one, and the folder of its dumps."""
        if self.watchdog:
            self.watchdog.configure(job)

    def watch_progress(self, timer: PhaseTimer) -> None:
        """Makes switches of the timer's phases count as progress of this rank."""
        if self.watchdog:
            self.watchdog.watch_progress(lambda: timer.progress)

    def report_iteration(self, iteration: int) -> None:
        """Reports a complete iteration to the launcher, which names it if a rank is lost."""
        if (launcher := Launcher.of_this_rank()) and os.environ.get("LOCAL_RANK") == "0":
            launcher.report(ITERATION, iteration)

    def shut_down(self) -> None:
        """Ends the job regularly, all ranks together."""
        # A rank that left earlier would break connections of ranks that still work.
        dist.barrier()
        if self.watchdog:
            self.watchdog.stop()
        dist.destroy_process_group()

    def exit_with_user_error(self, error: UserError) -> NoReturn:
        """Ends all ranks with exit code 2; the first rank to call it prints the error."""
        if self.watchdog:
            self.watchdog.end(EXIT_CODE, f"error: {error}")
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)

    def abort(self, error: Exception) -> NoReturn:
        """Ends all ranks with exit code 1 and this rank's traceback, or with the verdict on a lost rank."""
        if self.watchdog:
            self.watchdog.abort(error)
        raise error


def init_process_group(store: Store, rank: int, size: int) -> None:
    """Initializes the default process group and this rank's device; with GPUs, NCCL's communicator of all ranks too.

    NCCL creates it in the first collective that all ranks enter. The first use would otherwise be the messages of a
    weight sync, in which some ranks have none: the others would wait for them forever.
    """
    # Also for models in bfloat16: what is float32 in them, such as scores of experts, needs its precision.
    device.compute_in_float32()
    # GPU: NCCL's communicator of all ranks is made in a first all-reduce, before any rank could have no message.
    # GPU-TEST: tests/distributed/test_world.py::
    # test_join_with_a_gpu_enters_a_collective_first_and_waits_longer_than_a_stall
    # GPU-RAN: h200-1, h100-1
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(device.current_device())
    # Without device_id: with it each barrier would be NCCL's, and each new group a split of the job's communicator.
    dist.init_process_group(device.backend(), timeout=GROUP_TIMEOUT, store=store, rank=rank, world_size=size)
    if on_gpu:
        dist.all_reduce(torch.zeros(1, device=device.current_device()))
        torch.cuda.synchronize()


class _SharedLoopGroup(ProcessGroupGloo):
    """Gloo group on the devices of this process. Options that torch 2.14 adds have their defaults."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, **_: bool) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = list(_devices(os.getpid()))
        options._threads = THREADS * len(options._devices)
        options._timeout = timeout
        super().__init__(store, rank, size, options)


def share_event_loop() -> None:
    """Makes torch create the gloo groups of this process on common devices."""
    # `init_process_group` and `new_group` create gloo groups by this name of their module.
    distributed_c10d.ProcessGroupGloo = _SharedLoopGroup  # type: ignore[misc,assignment]


@cache
def _devices(pid: int) -> tuple[Any, ...]:
    """Returns gloo's devices: one per interface of GLOO_SOCKET_IFNAME, else one on the default interface."""
    # They are kept for a process id, because a fork has no event loop.
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    create = ProcessGroupGloo.create_device
    return tuple(create(interface=name) for name in names) or (ProcessGroupGloo.create_default_device(),)
