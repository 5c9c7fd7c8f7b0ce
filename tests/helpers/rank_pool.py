"""Ranks that live for the whole test session, each a process started once and joined into groups of any size.

    def work(x): return dist.get_rank() + x        # runs on every rank, a default group is initialised
    ranks.run(4, work, 10) == [10, 11, 12, 13]

A rank that raises fails the test with its own traceback; the others are not waited for but replaced. Ranks on the CPU
are forked. Ranks with GPUs are spawned: CUDA does not survive a fork of a process that has used it.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.machine import Machine
from verl_mg import device
from verl_mg.distributed.world import init_process_group, share_event_loop
from verl_mg.errors import UserError

if TYPE_CHECKING:
    from verl_mg.roles.context import JobContext

TIMEOUT_S = 1000
STACKS_S = 2
"""Seconds in which late ranks write their stacks."""


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


class RankPool:
    """As many ranks as the machine has, started at the first use so that forked ones know the test modules."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self.size = machine, machine.ranks
        self.timeout_s: float = TIMEOUT_S
        self._stores = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._runs = 0
        self._workers: list[tuple[multiprocessing.Process, Connection]] = []

    def start(self) -> None:
        """Fork or spawn the ranks."""
        context = multiprocessing.get_context("spawn" if self._machine.gpus else "fork")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._stacks(rank)), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, ranks: int, work: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """`work(*arguments, **options)` on each of `ranks` ranks; their results in rank order.

        Skips the test on a machine that has fewer.
        """
        if missing := self._machine.missing(ranks=ranks):
            pytest.skip(missing)
        if not self._workers:
            self.start()
        self._runs += 1
        store = self._stores / str(self._runs)
        try:
            return self._run(ranks, store, partial(work, **options) if options else work, arguments)
        except BaseException:  # also where the test is ended because it takes too long
            self.stop()
            raise

    def _run(self, ranks: int, store: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        pipes = [pipe for _, pipe in self._workers[:ranks]]
        for rank, pipe in enumerate(pipes):
            pipe.send((str(store), rank, ranks, work, arguments))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(results) < ranks:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(waiting, timeout=max(0, deadline - time.monotonic()))
            if not ready:
                late = [r for r in range(ranks) if r not in results]
                raise RankError(f"ranks {late} did not finish in {self.timeout_s} s\n{self._stacks_of(late)}")
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process died"
                if not ok:
                    raise RankError(f"rank {rank} of {ranks}: {value}")
                results[rank] = value
        return [results[rank] for rank in range(ranks)]

    def _stacks(self, rank: int) -> Path:
        return self._stores / f"stacks-{rank}"

    def _stacks_of(self, late: list[int]) -> str:
        """Where each late rank is."""
        for rank in late:
            os.kill(self._workers[rank][0].pid or 0, signal.SIGUSR2)
        time.sleep(STACKS_S)
        return "\n".join(f"rank {rank}:\n{self._stacks(rank).read_text()}" for rank in late)

    def stop(self) -> None:
        """End all ranks; the next run starts new ones."""
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers = []


def job_store() -> dist.Store:
    """The store that all ranks of the run share."""
    return dist.PrefixStore("job", dist.distributed_c10d._get_default_store())


def job_context() -> JobContext:
    """Context of a job on all ranks of the run."""
    from verl_mg.roles.context import JobContext

    return JobContext(job_store())


def refusal(function: Callable[..., object], *arguments: Any) -> str:
    """The message of the UserError that a function raises, "" where it raises none."""
    try:
        function(*arguments)
    except UserError as error:
        return str(error)
    return ""


def _serve(pipe: Connection, stacks: Path) -> None:
    faulthandler.register(signal.SIGUSR2, stacks.open("w"))
    torch.set_num_threads(1)
    share_event_loop()
    gc.freeze()  # what was imported before the fork need not be looked through again
    while True:
        try:
            store, rank, ranks, work, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if torch.cuda.is_available():
                os.environ["LOCAL_RANK"] = str(rank)
                device.set_default_variables()
            init_process_group(dist.FileStore(store, ranks), rank, ranks)
            value = work(*arguments)
            dist.barrier()
            dist.destroy_process_group()
            # Models and optimizers are cycles, and the groups that they hold have threads until they go.
            gc.collect()
            device.release_unused_memory()
            pipe.send((True, value))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
