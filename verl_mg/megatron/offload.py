"""What a role keeps on the device, moved to the host while others need the room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from verl_mg.megatron.model_runner import ModelRunner
from verl_mg.megatron.storages import as_bytes, gradient_buffers, optimizer_storages, storages, to_host, weight_storages


class CpuOffload:
    """The storages of a network and of its optimizer, if it has one; tensors and views stay the same ones.

    Two parts come and go: the weights, and what only training needs, the optimizer's state and the gradient buffers.
    Gradients are not kept: an update begins by clearing them. Weights that nothing trains are copied once.
    """

    def __init__(self, runner: ModelRunner, optimizer: Any = None) -> None:
        self._network, self._optimizer = runner, optimizer
        self._weights, self._state, self._gradients = _Part(), _Part(), _Part()

    def to_host(self, weights: bool = True) -> None:
        """Copy to the host, pinned where there is a GPU, and free the device; nothing where nothing is there."""
        if not self._network.is_member:
            return
        trained = self._optimizer is not None
        if weights:
            self._weights.copy(weight_storages(self._network), once=not trained)
        if trained:
            self._state.copy(optimizer_storages(self._network, self._optimizer))
            self._gradients.forget(storages(gradient_buffers(self._network)))
        torch.cuda.synchronize()
        for part in (self._weights, self._state, self._gradients):
            part.free()
        torch.cuda.empty_cache()

    def to_device(self, training: bool = True) -> None:
        """Take the device's memory again, with the values of before; gradients are zero."""
        for part in (self._weights, self._state, self._gradients)[: 3 if training else 1]:
            part.to_device()
        torch.cuda.synchronize()


class _Part:
    """Storages that come and go together. Room on the host is taken once."""

    def __init__(self) -> None:
        self._leaving: list[tuple[UntypedStorage, int]] = []
        self._rooms: list[Tensor | None] = []

    def copy(self, here: Sequence[UntypedStorage], once: bool = False) -> None:
        """Begin to copy what is here; once: what an earlier copy has is still right."""
        if not here:
            return
        if not (once and self._rooms):
            # An optimizer makes its moments in its first step.
            rooms = self._rooms if len(self._rooms) == len(here) else [None] * len(here)
            self._rooms = [to_host(storage, room) for storage, room in zip(here, rooms, strict=True)]
        self._leaving = [(storage, storage.nbytes()) for storage in here]

    def forget(self, here: Sequence[UntypedStorage]) -> None:
        """They come back as zeros."""
        if here:
            self._rooms = [None] * len(here)
            self._leaving = [(storage, storage.nbytes()) for storage in here]

    def free(self) -> None:
        """Give the device's memory back, when the copies are complete."""
        for storage, _ in self._leaving:
            storage.resize_(0)

    def to_device(self) -> None:
        """Take memory and begin to fill it."""
        leaving, self._leaving = self._leaving, []
        for (storage, size), room in zip(leaving, self._rooms, strict=bool(leaving)):
            storage.resize_(size)
            if room is None:
                as_bytes(storage).zero_()
            else:
                as_bytes(storage).copy_(room, non_blocking=True)


class OffloadManager:
    """Decides whose state occupies this rank's device: at most one of the registered roles, or the rollout engines."""

    def __init__(self) -> None:
        self._registered: list[CpuOffload] = []
        self._release_engines: Callable[[], None] | None = None

    def register(self, role: CpuOffload) -> None:
        """Adds a role whose state is on the host while other roles or engines compute."""
        self._registered.append(role)

    def register_engines(self, release: Callable[[], None]) -> None:
        """Sets the function by which the rollout engines release the device's memory; all ranks call it together."""
        self._release_engines = release

    def release_engines(self) -> None:
        """Makes the rollout engines release the device's memory; all ranks call it, since it may contain a barrier."""
        if self._release_engines is not None:
            self._release_engines()

    def load_exclusively(self, role: CpuOffload, training: bool = True) -> None:
        """Moves a role to the device and all other registered roles to the host.

        Args:
            role: the role that computes next; it need not be registered.
            training: also load optimizer state and gradient buffers, not the weights alone.
        """
        for other in self._registered:
            if other is not role:
                other.to_host()
        if not training and role in self._registered:
            role.to_host(weights=False)
        role.to_device(training)

    def offload_all(self) -> None:
        """Moves all registered roles to the host."""
        for role in self._registered:
            role.to_host()
