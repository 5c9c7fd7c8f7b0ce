"""Memory of a model in training as torch storages, and snapshots of it in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from verl_mg import device

Numbers = list[dict[str, int | float]]  # scalars of each parameter group of an optimizer, by name


def storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Returns the distinct storages of the tensors, without empty ones."""
    # Weights are views of few storages, each of which is moved once.
    by_address = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in by_address.values() if storage.nbytes()]


def storages_here(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Returns the distinct storages of the tensors that are on this rank's device."""
    place = device.current_device().type
    return storages(tensor for tensor in tensors if tensor.device.type == place)


def as_bytes(storage: UntypedStorage) -> Tensor:
    """Views a storage as a (bytes,) uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def to_host(storage: UntypedStorage, buffer: Tensor | None = None) -> Tensor:
    """Copies a storage, into a buffer of its size if there is one; synchronize the device before reading the copy."""
    source = as_bytes(storage)
    if buffer is None or buffer.numel() != source.numel():
        buffer = device.host_buffer(source)
    return buffer.copy_(source, non_blocking=True)


class Snapshot:
    """Host copy of weights and optimizer state, for a later `restore`; its memory is reused by each `take`.

    It has two states, of which only the second has a state to restore:

        empty --take--> taken --take--> taken, newer values
                        taken --restore--> taken, and its values are in the model again
    """

    def __init__(
        self, updated: Callable[[], list[UntypedStorage]], optimizers: Callable[[], list[torch.optim.Optimizer]]
    ) -> None:
        # Functions and not lists: moments appear with the first step, so later calls return more storages.
        self._updated, self._optimizers = updated, optimizers
        self._copies: dict[int, tuple[UntypedStorage, Tensor]] = {}
        self._numbers: list[Numbers] = []
        self._states: list[dict[Any, Any]] = []

    @property
    def taken(self) -> bool:
        """Whether there is a state to restore."""
        return bool(self._copies)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager: temporarily restores the snapshot, and puts the current state back on exit."""
        current = Snapshot(self._updated, self._optimizers)
        current.take()
        self.restore()
        try:
            yield
        finally:
            current.restore()

    def take(self) -> None:
        """Copies the current state."""
        buffers = {address: buffer for address, (_, buffer) in self._copies.items()}
        self._copies = {s.data_ptr(): (s, to_host(s, buffers.get(s.data_ptr()))) for s in self._updated()}
        self._numbers = [_numbers(inner) for inner in self._optimizers()]
        self._states = [dict(inner.state) for inner in self._optimizers()]
        device.synchronize()

    def restore(self) -> None:
        """Writes the copied state back; does nothing without one."""
        if not self._copies:
            return
        for storage, values in self._copies.values():
            as_bytes(storage).copy_(values, non_blocking=True)
        inners = self._optimizers()
        for inner, numbers, state in zip(inners, self._numbers, self._states, strict=True):
            inner.state.clear()  # an optimizer creates its moments in its first step
            inner.state.update(state)
            for group, saved in zip(inner.param_groups, numbers, strict=True):
                group.update(saved)
        device.synchronize()


def _numbers(inner: torch.optim.Optimizer) -> Numbers:
    """Returns scalars such as the step count, which some optimizers keep outside of their tensors."""
    return [
        {name: value for name, value in group.items() if isinstance(value, int | float)} for group in inner.param_groups
    ]
