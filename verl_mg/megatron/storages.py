"""What the training of a network keeps in memory, as storages: parameters, optimizer, gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from verl_mg.megatron.model_runner import ModelRunner


def gradient_buffers(runner: ModelRunner) -> Iterator[Tensor]:
    """The flat buffers of a trained network's gradients."""
    for chunk in runner.runnable:
        model: Any = chunk
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            yield buffer.grad_data


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Torch's, inside those of megatron-core."""
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


def weight_storages(runner: ModelRunner) -> list[UntypedStorage]:
    """Of parameters and buffers."""
    return storages(_of_model(runner))


def optimizer_storages(runner: ModelRunner, optimizer: Any) -> list[UntypedStorage]:
    """Of the optimizer's state on the weights' device, where that is not the weights themselves."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in _of_model(runner)}
    devices = {tensor.device for tensor in _of_model(runner)}
    own = (tensor for tensor in _of_optimizer(optimizer) if tensor.device in devices)
    return storages(tensor for tensor in own if tensor.untyped_storage().data_ptr() not in weights)


def changed_storages(runner: ModelRunner, optimizer: Any) -> list[UntypedStorage]:
    """Of all that an update writes but the gradients: no frozen weights."""
    frozen = {id(weight) for chunk in runner.chunks for weight in chunk.parameters() if not weight.requires_grad}
    changed = (tensor for tensor in _of_model(runner) if id(tensor) not in frozen)
    return storages(chain(changed, _of_optimizer(optimizer)))


def storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Each storage once, those of no byte left out."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in found.values() if storage.nbytes()]


def as_bytes(storage: UntypedStorage) -> Tensor:
    """The memory itself, (bytes,) uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def to_host(storage: UntypedStorage, room: Tensor | None = None) -> Tensor:
    """A copy on the host, pinned where there is a GPU, in `room` where that fits; wait for the device before use."""
    place = as_bytes(storage)
    if room is None or room.numel() != place.numel():
        room = torch.empty_like(place, device="cpu", pin_memory=storage.is_cuda)
    return room.copy_(place, non_blocking=True)


def _of_model(runner: ModelRunner) -> Iterator[Tensor]:
    for chunk in runner.chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()


def _of_optimizer(optimizer: Any) -> Iterator[Tensor]:
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
