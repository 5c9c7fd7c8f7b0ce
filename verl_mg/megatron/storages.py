"""Memory of a model in training, as torch storages: weights, optimizer state, gradients; and snapshots of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from verl_mg.megatron.model_runner import ModelRunner

Numbers = list[dict[str, int | float]]
"""Scalars of each parameter group of an optimizer, by name."""


def gradient_buffers(runner: ModelRunner) -> Iterator[Tensor]:
    """Yields the flat gradient buffers of a trained model on this rank."""
    for buffer in parameter_buffers(runner):
        yield buffer.grad_data


def parameter_buffers(runner: ModelRunner) -> Iterator[Any]:
    """Yields megatron-core's buffers of the trained parameters on this rank and of their gradients."""
    for chunk in runner.model_chunks:
        model: Any = chunk
        yield from (*model.buffers, *model.expert_parallel_buffers)


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Returns the torch optimizers inside an optimizer of megatron-core."""
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


def use_fused_step(optimizer: Any) -> None:
    """Makes the torch optimizers inside a new optimizer of megatron-core update all weights in one pass over memory."""
    for inner in inner_optimizers(optimizer):
        if type(inner) in (torch.optim.Adam, torch.optim.AdamW):  # not Transformer Engine's or Apex's, which do so
            for group in inner.param_groups:
                group.update(fused=True, foreach=False)


def weight_storages(runner: ModelRunner) -> list[UntypedStorage]:
    """Returns the storages of parameters and buffers."""
    return storages(_model_tensors(runner))


def optimizer_storages(runner: ModelRunner, optimizer: Any) -> list[UntypedStorage]:
    """Returns the storages of the optimizer state on the model's device that are not the weights themselves.

    Args:
        runner: the trained model.
        optimizer: its optimizer of megatron-core.
    """
    weights = {tensor.untyped_storage().data_ptr() for tensor in _model_tensors(runner)}
    devices = {tensor.device for tensor in _model_tensors(runner)}
    on_device = (tensor for tensor in _optimizer_tensors(optimizer) if tensor.device in devices)
    on_device = (tensor for tensor in on_device if tensor.untyped_storage().resizable())  # not those of a file
    return storages(tensor for tensor in on_device if tensor.untyped_storage().data_ptr() not in weights)


def updated_storages(runner: ModelRunner, optimizer: Any) -> list[UntypedStorage]:
    """Returns the storages that an update writes, except gradients; frozen weights are not among them.

    Args:
        runner: the trained model.
        optimizer: its optimizer of megatron-core.
    """
    frozen = {id(weight) for chunk in runner.chunks for weight in chunk.parameters() if not weight.requires_grad}
    updated = (tensor for tensor in _model_tensors(runner) if id(tensor) not in frozen)
    return storages(chain(updated, _optimizer_tensors(optimizer)))


def storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Returns the distinct storages of the tensors, without empty ones."""
    by_address = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in by_address.values() if storage.nbytes()]


def as_bytes(storage: UntypedStorage) -> Tensor:
    """Views a storage as a (bytes,) uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def to_host(storage: UntypedStorage, buffer: Tensor | None = None) -> Tensor:
    """Copies a storage to the host without waiting for the device; synchronize before reading the copy.

    Args:
        storage: the memory to copy.
        buffer: (bytes,) uint8 host memory to write to where its size fits; otherwise new memory is allocated, pinned
            where the storage is on a GPU.

    Returns:
        (bytes,) uint8, the copy.
    """
    source = as_bytes(storage)
    if buffer is None or buffer.numel() != source.numel():
        buffer = torch.empty_like(source, device="cpu", pin_memory=storage.is_cuda)
    return buffer.copy_(source, non_blocking=True)


class Snapshot:
    """Host copy of weights and optimizer state, for a later `restore`; its memory is reused by each `take`."""

    def __init__(self, runner: ModelRunner, optimizer: Any) -> None:
        """Creates an empty snapshot.

        Args:
            runner: the trained model.
            optimizer: its optimizer of megatron-core.
        """
        self._runner, self._optimizer = runner, optimizer
        self._copies: dict[int, tuple[UntypedStorage, Tensor]] = {}
        self._numbers: list[Numbers] = []
        self._had_moments: list[bool] = []

    @property
    def taken(self) -> bool:
        """Whether there is a state to restore."""
        return bool(self._copies)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager: temporarily restores the snapshot, and puts the current state back on exit."""
        current = Snapshot(self._runner, self._optimizer)
        current.take()
        self.restore()
        try:
            yield
        finally:
            current.restore()

    def take(self) -> None:
        """Copies the current state."""
        buffers = {address: buffer for address, (_, buffer) in self._copies.items()}
        updated = updated_storages(self._runner, self._optimizer)
        self._copies = {s.data_ptr(): (s, to_host(s, buffers.get(s.data_ptr()))) for s in updated}
        self._numbers = [_numbers(inner) for inner in inner_optimizers(self._optimizer)]
        self._had_moments = [bool(inner.state) for inner in inner_optimizers(self._optimizer)]
        _synchronize()

    def restore(self) -> None:
        """Writes the copied state back; does nothing without one."""
        if not self._copies:
            return
        for storage, values in self._copies.values():
            as_bytes(storage).copy_(values, non_blocking=True)
        inners = inner_optimizers(self._optimizer)
        for inner, numbers, had_moments in zip(inners, self._numbers, self._had_moments, strict=True):
            if not had_moments:  # an optimizer creates them in its first step
                inner.state.clear()
            for group, saved in zip(inner.param_groups, numbers, strict=True):
                group.update(saved)
        _synchronize()


def _model_tensors(runner: ModelRunner) -> Iterator[Tensor]:
    runner.gathers.wait_for_all()
    for chunk in runner.chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _numbers(inner: torch.optim.Optimizer) -> Numbers:
    """Returns scalars such as the step count, which some optimizers keep outside of their tensors."""
    return [
        {name: value for name, value in group.items() if isinstance(value, int | float)} for group in inner.param_groups
    ]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
