"""Counts what a rank sends and receives, by module of verl_mg."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

HELPERS = ("verl_mg.distributed", "tools.bench.message_counter", "contextlib")
"""Modules that send for others."""
MODELS = ("megatron", "fsdp", "training")
"""Packages whose messages belong to the computation of models."""


@dataclass
class Traffic:
    """Collectives and messages of this rank, and the bytes that it receives in them, by module."""

    calls: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)

    def copy(self) -> Traffic:
        """Returns what has been counted so far."""
        return Traffic(self.calls.copy(), self.received.copy())

    def since(self, before: Traffic) -> Traffic:
        """Returns what was counted after `before`."""
        return Traffic(self.calls - before.calls, self.received - before.received)

    @property
    def outside_models(self) -> Traffic:
        """Returns the part that does not belong to the computation of models."""
        parts = ({k: n for k, n in part.items() if k.split(".")[0] not in MODELS} for part in vars(self).values())
        return Traffic(*map(Counter, parts))


def _received(name: str, arguments: tuple[Any, ...]) -> int:
    first = arguments[0] if arguments else None
    if isinstance(first, list):  # the tensors of all ranks, this one's too
        return sum(tensor.nbytes for tensor in first)
    return first.nbytes if isinstance(first, Tensor) and name != "isend" else 0


def _requester() -> str:
    """Returns the innermost module of verl_mg that is not a helper, without the name of the package."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("verl_mg.") and not module.startswith(HELPERS):
            return module.removeprefix("verl_mg.")
        frame = frame.f_back
    return ""


FUNCTIONS = ("all_gather", "all_reduce", "all_to_all_single", "barrier", "broadcast", "gather", "irecv", "isend")


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Context in which calls of torch.distributed are counted, in all threads of this process."""
    traffic = Traffic()

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            requester = _requester()
            traffic.calls[requester] += 1
            traffic.received[requester] += _received(name, arguments)
            return call(*arguments, **options)

        return counted

    with ExitStack() as patches:
        for name in FUNCTIONS:
            counted = counting(name, getattr(dist, name))
            for module in (dist, distributed_c10d):  # which compares operations of batches with its own names
                patches.enter_context(mock.patch.object(module, name, counted))
        yield traffic
