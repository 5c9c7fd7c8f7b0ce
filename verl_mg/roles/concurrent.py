"""Work that roles were asked for and nobody has looked at yet: so roles on different ranks compute at the same time.

    batch["old_logprobs"] = job.actor.logprobs(batch)         asked: the rows travel to the actor's ranks
    batch["ref_logprobs"] = job.reference.logprobs(batch)     asked: ... to the reference's
    batch["old_logprobs"] - batch["ref_logprobs"]             looked at: every rank does what it was asked for, in this
                                                              order, and then all columns return

Every rank asks for the same in the same order, and settles at the latest where it meets the others in something else,
so it does not matter where a rank looks first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.phase_timer import PhaseTimer

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Task:
    """work: what this rank does, with nobody but the ranks of the same role. deliver: done by all ranks together."""

    work: Callable[[], Any]
    deliver: Callable[[Any], None]


class RoleExecutor:
    """What the roles of a job have been asked for. eager: everything is done as soon as it is asked for."""

    def __init__(self, eager: bool = False, timer: PhaseTimer | None = None) -> None:
        self._eager, self.timer = eager, timer or PhaseTimer()
        self._tasks: list[_Task] = []

    def column(self, entries: int, work: Callable[[], Result], deliver: Callable[[Result], Tensor]) -> Tensor:
        """A float32 tensor (entries,) that is `deliver(work())`, filled at the first look at it."""
        promised = PromisedColumn.of(entries, self.settle)
        self._ask(_Task(work, lambda result: promised.fill(deliver(result))))
        return promised.plain() if self._eager else promised

    def metrics(self, work: Callable[[], Result], deliver: Callable[[Result], Mapping[str, float]]) -> Metrics:
        """Numbers by name that are `deliver(work())` at the first look at them."""
        promised = Metrics(self.settle)
        self._ask(_Task(work, lambda result: promised.fill(deliver(result))))
        return promised

    def settle(self) -> None:
        """Do all that was asked for; all ranks call it together."""
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        with self.timer("work"):
            results = [task.work() for task in tasks]
        self.timer.meet()
        with self.timer("rows"):
            for task, result in zip(tasks, results, strict=True):
                task.deliver(result)

    def settle_for(self, batch: Batch) -> None:
        """Before a batch's columns travel: ranks without rows would not look at them."""
        columns = [batch[name] for name in batch.names()]
        if any(isinstance(column, PromisedColumn) and column.pending for column in columns):
            self.settle()

    def _ask(self, task: _Task) -> None:
        self._tasks.append(task)
        if self._eager:
            self.settle()


def _nothing() -> None: ...


class PromisedColumn(Tensor):
    """A tensor whose values come when something is done with it; its shape is known before."""

    settle: Callable[[], None]
    pending = True

    @staticmethod
    def of(entries: int, settle: Callable[[], None]) -> PromisedColumn:
        """(entries,) float32."""
        promised = torch.empty(entries).as_subclass(PromisedColumn)
        promised.settle = settle
        return promised

    def fill(self, values: Tensor) -> None:
        """Set the values, once."""
        self.settle, self.pending = _nothing, False
        self.plain().copy_(values)

    def plain(self) -> Tensor:
        """The same memory as an ordinary tensor, filled or not."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.settle()
        return self.plain().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _KNOWN_BEFORE:
            for one in _promised((args, kwargs)):
                one.settle()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_KNOWN_BEFORE = frozenset(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad"))


def _promised(value: Any) -> Iterator[PromisedColumn]:
    if isinstance(value, PromisedColumn):
        yield value
    elif isinstance(value, dict):
        yield from _promised(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _promised(part)


class Metrics(MutableMapping[str, float]):
    """Numbers by name that come at the first look; `|` makes a dict of them."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle
        self._values: dict[str, float] = {}

    def fill(self, values: Mapping[str, float]) -> None:
        """Set the numbers, once."""
        self._settle, self._values = _nothing, dict(values)

    def __getitem__(self, name: str) -> float:
        self._settle()
        return self._values[name]

    def __setitem__(self, name: str, value: float) -> None:
        self._settle()
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        self._settle()
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        self._settle()
        return iter(self._values)

    def __len__(self) -> int:
        self._settle()
        return len(self._values)

    def __or__(self, other: Mapping[str, float]) -> dict[str, float]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, float]) -> dict[str, float]:
        return {**other, **self}

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[type[dict[str, float]], tuple[dict[str, float]]]:
        return dict, (dict(self),)
