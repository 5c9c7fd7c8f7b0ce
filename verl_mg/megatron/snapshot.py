"""The state of an update at one moment, to go back to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from verl_mg.megatron.model_runner import ModelRunner
from verl_mg.megatron.storages import as_bytes, changed_storages, inner_optimizers, to_host

Numbers = list[dict[str, int | float]]


class Snapshot:
    """Parameters and optimizer on the host, in memory that each `take` writes anew."""

    def __init__(self, runner: ModelRunner, optimizer: Any) -> None:
        self._network, self._optimizer = runner, optimizer
        self._kept: dict[int, tuple[UntypedStorage, Tensor]] = {}
        self._numbers: list[Numbers] = []
        self._moments: list[bool] = []

    @property
    def taken(self) -> bool:
        """Whether there is something to go back to."""
        return bool(self._kept)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, what was kept is there; afterwards what is there now."""
        now = Snapshot(self._network, self._optimizer)
        now.take()
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def take(self) -> None:
        """Keep what is there now."""
        rooms = {address: room for address, (_, room) in self._kept.items()}
        kept = changed_storages(self._network, self._optimizer)
        self._kept = {s.data_ptr(): (s, to_host(s, rooms.get(s.data_ptr()))) for s in kept}
        self._numbers = [_numbers(inner) for inner in inner_optimizers(self._optimizer)]
        self._moments = [bool(inner.state) for inner in inner_optimizers(self._optimizer)]
        _wait()

    def restore(self) -> None:
        """Go back to what was kept; nothing where nothing was."""
        if not self._kept:
            return
        for storage, values in self._kept.values():
            as_bytes(storage).copy_(values, non_blocking=True)
        inners = inner_optimizers(self._optimizer)
        for inner, numbers, had_moments in zip(inners, self._numbers, self._moments, strict=True):
            if not had_moments:  # an optimizer makes them in its first step
                inner.state.clear()
            for group, own in zip(inner.param_groups, numbers, strict=True):
                group.update(own)
        _wait()


def _numbers(inner: torch.optim.Optimizer) -> Numbers:
    """Such as the count of steps, which some optimizers keep beside their tensors."""
    return [
        {name: value for name, value in group.items() if isinstance(value, int | float)} for group in inner.param_groups
    ]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
