"""Ranks in a process of their own, which is prepared before anything is imported.

with SeparateRanks(use_interpreter) as ranks:
    ranks.run(4, work, argument)          # as `RankPool.run`
"""

import importlib
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self


class SeparateRanks:
    """A pool of ranks whose parent has called a function first, with arguments."""

    def __init__(self, prepare: Callable[..., None], *arguments: Any) -> None:
        self._prepare, self._arguments = prepare, arguments

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._prepare, self._arguments))
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Closing the pipe may not end it: processes forked since it was made have its ends too.
        self._pipe.send(None)
        self._process.join()
        self._pipe.close()

    def run(self, ranks: int, work: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """`work(*arguments, **options)` on each of `ranks` ranks; their results in rank order."""
        self._pipe.send((ranks, work.__module__, work.__name__, arguments, options))
        succeeded, value = self._pipe.recv()
        assert succeeded, value
        results: list[Any] = value
        return results


def _serve(pipe: Connection, prepare: Callable[..., None], prepared: tuple[Any, ...]) -> None:
    prepare(*prepared)
    from tests.helpers.machine import Machine
    from tests.helpers.rank_pool import RankPool

    pool = RankPool(Machine.this())
    while request := _received(pipe):
        ranks, module, name, arguments, options = request
        try:
            work = getattr(importlib.import_module(module), name)
            pipe.send((True, pool.run(ranks, work, *arguments, **options)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    pool.stop()


def _received(pipe: Connection) -> tuple[int, str, str, tuple[Any, ...], dict[str, Any]] | None:
    try:
        request: tuple[int, str, str, tuple[Any, ...], dict[str, Any]] | None = pipe.recv()
    except EOFError:  # the test process was killed
        return None
    return request
