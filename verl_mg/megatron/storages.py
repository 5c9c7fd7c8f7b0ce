"""Memory of a Megatron model in training, as torch storages: weights, optimizer state, gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from verl_mg.megatron.model_runner import ModelRunner
from verl_mg.training.storages import Snapshot, storages


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
        # Optimizers of Transformer Engine and Apex are fused themselves.
        if type(inner) in (torch.optim.Adam, torch.optim.AdamW):
            for group in inner.param_groups:
                group.update(fused=True, foreach=False)


def optimizer_storages(runner: ModelRunner, optimizer: Any) -> list[UntypedStorage]:
    """Returns the storages of the optimizer state on the model's device that are not the weights themselves."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in runner.model_tensors()}
    devices = {tensor.device for tensor in runner.model_tensors()}
    on_device = (tensor for tensor in _optimizer_tensors(optimizer) if tensor.device in devices)
    # On a CPU rank moments in a mapped file have the model's device too, and memory that cannot be freed.
    on_device = (tensor for tensor in on_device if tensor.untyped_storage().resizable())
    return storages(tensor for tensor in on_device if tensor.untyped_storage().data_ptr() not in weights)


def updated_storages(runner: ModelRunner, optimizer: Any) -> list[UntypedStorage]:
    """Returns the storages that an update writes, except gradients; frozen weights are not among them."""
    frozen = {id(weight) for chunk in runner.chunks for weight in chunk.parameters() if not weight.requires_grad}
    updated = (tensor for tensor in runner.model_tensors() if id(tensor) not in frozen)
    return storages(chain(updated, _optimizer_tensors(optimizer)))


def snapshot(runner: ModelRunner, optimizer: Any) -> Snapshot:
    """Returns an empty snapshot of the weights and the optimizer state of a model."""
    return Snapshot(partial(updated_storages, runner, optimizer), partial(inner_optimizers, optimizer))


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
