"""Execution of role calls: immediately, or together at the end of a `with job.concurrent_roles()` block.

    with job.concurrent_roles():
        batch["old_logprobs"] = job.actor.compute_logprobs(batch)        requested: rows travel to the actor's ranks
        batch["ref_logprobs"] = job.reference.compute_logprobs(batch)    requested: rows travel to the reference's ranks
    batch["old_logprobs"] - batch["ref_logprobs"]                        both are computed here

A call has two parts. `work` computes and involves only the ranks of the role. `deliver` sends the results to the owners
of the rows and involves all ranks.

    IMMEDIATE   outside of a block: a call runs `work` and `deliver`, and returns the result
      |  with job.concurrent_roles():
      v
    QUEUED      a call returns a PendingColumn or PendingMetrics, whose use raises
      |  end of the block: runs all calls                     -> IMMEDIATE
      |  the body raises: drops all calls                     -> IMMEDIATE

At the end each rank runs the `work` of all calls in the order of the requests, then all `deliver`, so that roles on
disjoint ranks compute at the same time. A `deliver` before another `work` would make its ranks wait for the first role:

    rank 0, of the actor        work of actor        | deliver both
    rank 1, of the reference    work of reference    | deliver both
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import Store

from verl_mg.checkpoint.model_directory import ModelDirectories
from verl_mg.distributed.collectives import ProcessGroups
from verl_mg.pending_column import PendingColumn
from verl_mg.phase_timer import PhaseTimer
from verl_mg.rows.plan import RowIndexer
from verl_mg.training.offload import OffloadManager

Result = TypeVar("Result")
PACKAGE = "verl_mg"


class PendingMetrics(Mapping[str, float]):
    """Metrics of a role call inside a `concurrent_roles` block; they can be read after the block."""

    def __init__(self, call: str) -> None:
        self._call = call
        self._values: dict[str, float] | None = None

    def fill(self, values: Mapping[str, float]) -> None:
        """Sets the metrics, at the end of the block."""
        self._values = dict(values)

    def _read(self) -> dict[str, float]:
        if self._values is None:
            raise RuntimeError(
                f"the metrics of {self._call} are not computed yet: they are requested in a "
                "`with job.concurrent_roles()` block; read them after the block"
            )
        return self._values

    def __getitem__(self, name: str) -> float:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return f"PendingMetrics({self._call})" if self._values is None else repr(self._values)


@dataclass(frozen=True)
class _RequestLine:
    """The line outside the package that made a role call."""

    frame: FrameType
    instruction: int
    line: int

    @classmethod
    def find(cls) -> _RequestLine | None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == PACKAGE:
            frame = frame.f_back
        return None if frame is None else cls(frame, frame.f_lasti, frame.f_lineno)


@dataclass(frozen=True)
class _Call:
    name: str
    work: Callable[[], Any]
    deliver: Callable[[Any], None]
    requested_at: _RequestLine | None


class RoleExecutor:
    """Runs the role calls of this rank, the same on all ranks; phases of the timer: `role_compute`, `row_dispatch`."""

    def __init__(self, timer: PhaseTimer) -> None:
        self._timer = timer
        self._queue: list[_Call] | None = None
        # Not a dict: keys contain a `Fingerprint`, which cannot be hashed because tensors are edited in place.
        self._shared: list[tuple[object, Any]] = []

    @contextmanager
    def concurrent(self) -> Iterator[None]:
        """Queues the calls made inside and runs them at the end; drops them if the body raises, refuses nesting."""
        if self._queue is not None:
            raise RuntimeError("`with job.concurrent_roles()` blocks cannot be nested: use one block for all calls")
        queue = self._queue = []
        try:
            yield
        finally:
            self._queue, self._shared = None, []
        # After `finally`, so not where the body has raised: then not all calls of the block were requested.
        self._run(queue)

    def once(self, key: object, compute: Callable[[], Result]) -> Result:
        """Returns `compute()`; inside a `concurrent_roles` block the result of the first call with an equal key."""
        # `compute` may be a collective, so keys that are equal on one rank must be equal on all.
        results: list[Result] = [result for known, result in self._shared if known == key]
        if results:
            return results[0]
        result = compute()
        if self._queue is not None:
            self._shared.append((key, result))
        return result

    def require_outside_block(self, name: str) -> None:
        """Raises RuntimeError inside a `concurrent_roles` block, where queued calls have not run yet."""
        if self._queue is not None:
            raise RuntimeError(
                f"{name} is called in a `with job.concurrent_roles()` block, before the calls of the block have run; "
                "call it after the block"
            )

    def column(
        self,
        name: str,
        entries: int,
        work: Callable[[], Result],
        deliver: Callable[[Result], Tensor],
        shape: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Returns the column `deliver(work())`; inside a `concurrent_roles` block a `PendingColumn` of it.

        The column is (entries, *shape); `name` is the call as written in a recipe, such as "actor.compute_logprobs".
        """
        return self._call(name, work, deliver, lambda: PendingColumn.create(name, (entries, *shape), dtype))

    def metrics(
        self, name: str, work: Callable[[], Result], deliver: Callable[[Result], Mapping[str, float]]
    ) -> Mapping[str, float]:
        """Returns the metrics `deliver(work())`, the same on all ranks; inside a block `PendingMetrics` of them."""
        return self._call(name, work, deliver, lambda: PendingMetrics(name))

    def _call(
        self, name: str, work: Callable[[], Any], deliver: Callable[[Any], Any], make_pending: Callable[[], Any]
    ) -> Any:
        if self._queue is not None:
            pending = make_pending()
            self._queue.append(_Call(name, work, lambda result: pending.fill(deliver(result)), _RequestLine.find()))
            return pending
        delivered: list[Any] = []
        self._run([_Call(name, work, lambda result: delivered.append(deliver(result)), None)])
        return delivered[0]

    def _run(self, calls: list[_Call]) -> None:
        with self._timer("role_compute"):
            results = [_at_request_line(call, call.work) for call in calls]
        self._timer.barrier("role_compute")  # an exact timer counts the wait for slower roles apart from the dispatch
        with self._timer("row_dispatch"):
            for call, result in zip(calls, results, strict=True):
                _at_request_line(call, call.deliver, result)


def _at_request_line(call: _Call, function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls the function; the traceback of an exception includes the line that requested the call."""
    try:
        return function(*arguments)
    except Exception as error:
        if call.requested_at is None:
            raise
        at, inner = call.requested_at, error.__traceback__
        # When a call runs, the recipe is at the end of the block: the line of the request is put on top of the frames
        # of the error.
        error.add_note(f"{call.name} was requested at {at.frame.f_code.co_filename}:{at.line}")
        raise error.with_traceback(
            TracebackType(inner.tb_next if inner else None, at.frame, at.instruction, at.line)
        ) from error.__cause__


class JobContext:
    """Constructor argument of every role, engine group and rollout of a job on this rank."""

    def __init__(self, store: Store, timer: PhaseTimer | None = None) -> None:
        self.store, self.timer = store, timer or PhaseTimer()
        self.offload = OffloadManager()
        """Decides which role or engine occupies the memory of this rank's device."""
        self.executor = RoleExecutor(self.timer)
        self.rows = RowIndexer()
        """Indexes the rows of each batch once, whatever the number of role calls."""
        self.directories = ModelDirectories()
        """Model directories whose headers are read once, whatever the number of roles that load them."""
        self.process_groups = ProcessGroups()
