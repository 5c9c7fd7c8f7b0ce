"""Ranks that live for the whole test session, each a process forked once and joined into groups of any size.

    def work(x): return dist.get_rank() + x        # runs on every rank, a default group is initialised
    ranks.run(4, work, 10) == [10, 11, 12, 13]

A rank that raises fails the test with its own traceback; the others are not waited for but replaced.
"""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from verl_mg.distributed.gloo import share_event_loop

if TYPE_CHECKING:
    from verl_mg.roles.context import JobContext

TIMEOUT_S = 500


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


class RankPool:
    """Up to `size` ranks, forked at the first use so that they know the test modules."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._stores = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._runs = 0
        self._workers: list[tuple[multiprocessing.Process, Connection]] = []

    def start(self) -> None:
        """Fork the ranks."""
        context = multiprocessing.get_context("fork")
        for _ in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`work(*arguments)` on each of `ranks` ranks; their results in rank order."""
        if not self._workers:
            self.start()
        self._runs += 1
        store = self._stores / str(self._runs)
        pipes = [pipe for _, pipe in self._workers[:ranks]]
        for rank, pipe in enumerate(pipes):
            pipe.send((str(store), rank, ranks, work, arguments))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(results) < ranks:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(waiting, timeout=max(0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                late = [r for r in range(ranks) if r not in results]
                raise RankError(f"ranks {late} did not finish in {TIMEOUT_S} s")
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    ok, value = False, "the process died"
                if not ok:
                    self.stop()
                    raise RankError(f"rank {rank} of {ranks}: {value}")
                results[rank] = value
        return [results[rank] for rank in range(ranks)]

    def stop(self) -> None:
        """End all ranks; the next run forks new ones."""
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

    return JobContext.create(job_store())


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    share_event_loop()
    gc.freeze()  # what was imported before the fork need not be looked through again
    while True:
        try:
            store, rank, ranks, work, arguments = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
            value = work(*arguments)
            dist.barrier()
            dist.destroy_process_group()
            # Models and optimizers are cycles, and the groups that they hold have threads until they go.
            gc.collect()
            pipe.send((True, value))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
