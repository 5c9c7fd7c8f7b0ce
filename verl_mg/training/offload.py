"""CPU offload: moves weights, optimizer state and gradients of a role between device and host.

A registered role is in one of three states; `OffloadManager.load_exclusively` moves between them:

    state       weights   optimizer state   gradients
    trains      device    device            device, cleared by each update
    computes    device    host              freed
    idle        host      host              freed          another role, or an engine, has the device
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, UntypedStorage

from verl_mg import device
from verl_mg.training.runner import Runner
from verl_mg.training.storages import as_bytes, to_host
from verl_mg.training.trainer import Trainer


class CpuOffload:
    """Storages of a model and of its optimizer; tensors and views keep their identity when they are moved.

    Weights are moved separately from optimizer state and gradient buffers, which only training needs. Gradients are
    not preserved, since an update begins by clearing them. Frozen weights are copied to the host only once.
    A model without a trainer is frozen.
    """

    def __init__(self, runner: Runner, trainer: Trainer | None = None) -> None:
        self._runner, self._trainer = runner, trainer
        self._weights, self._state, self._gradients = _Part(), _Part(), _Part()

    def to_host(self, weights: bool = True) -> None:
        """Copies to pinned host memory and frees the device memory; does nothing for what is on the host already."""
        # The memory stays in torch's allocator, for the role that is loaded next.
        if not self._runner.is_member:
            return
        if weights:
            self._runner.drop_caches()
            self._weights.copy(self._runner.weight_storages(), once=self._trainer is None)
        if self._trainer is not None:
            self._state.copy(self._trainer.state_storages())
            self._gradients.discard(self._trainer.gradient_storages())
        # All copies run together; memory is freed only when the last one is complete.
        device.synchronize()
        for part in (self._weights, self._state, self._gradients):
            part.free()

    def forget_weights(self) -> None:
        """Discards the host copy of weights that have changed on the device."""
        self._weights = _Part()

    def to_device(self, training: bool = True) -> None:
        """Allocates device memory and restores the values; gradients are zero."""
        for part in (self._weights, self._state, self._gradients)[: 3 if training else 1]:
            part.to_device()
        device.synchronize()


class _Part:
    """Storages that are moved together; host buffers are allocated once."""

    def __init__(self) -> None:
        self._leaving: list[tuple[UntypedStorage, int]] = []
        self._host_buffers: list[Tensor | None] = []

    def copy(self, device_storages: Sequence[UntypedStorage], once: bool = False) -> None:
        """Starts the copy to the host; `once`: an earlier copy is still valid."""
        if not device_storages:
            return
        if not (once and self._host_buffers):
            # An optimizer allocates its moments in its first step: then there are more storages than buffers.
            count, buffers = len(device_storages), self._host_buffers
            buffers = buffers if len(buffers) == count else [None] * count
            self._host_buffers = list(map(to_host, device_storages, buffers))
        self._leaving = [(storage, storage.nbytes()) for storage in device_storages]

    def discard(self, device_storages: Sequence[UntypedStorage]) -> None:
        """Marks storages whose values are not preserved: they are restored as zeros."""
        if device_storages:
            self._host_buffers = [None] * len(device_storages)
            self._leaving = [(storage, storage.nbytes()) for storage in device_storages]

    def free(self) -> None:
        """Frees the device memory; called when the copies are complete."""
        for storage, _ in self._leaving:
            # Resizing keeps the tensors and views of the storage, which optimizers and DDP's buffers refer to.
            storage.resize_(0)

    def to_device(self) -> None:
        """Allocates device memory and starts to fill it."""
        leaving, self._leaving = self._leaving, []
        for (storage, size), buffer in zip(leaving, self._host_buffers, strict=bool(leaving)):
            storage.resize_(size)
            if buffer is None:
                as_bytes(storage).zero_()
            else:
                as_bytes(storage).copy_(buffer, non_blocking=True)


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
        """Moves a role to the device and all other registered roles to the host; without `training` only weights."""
        # Others leave first: the device need not hold two roles.
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
