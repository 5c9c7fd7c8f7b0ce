"""State of a trained model: its memory as torch storages, and weights and moments as boxes of Hugging Face tensors.

Megatron's distributed optimizer divides the flat memory of all parameters among the data-parallel ranks; a rank's part
of a parameter is a contiguous range of its elements, which is a few boxes. Each rank writes its boxes,
nothing is gathered. Under the same layout each rank reads them back, under another one the boxes that it needs instead.
The weights that the model computes with then come from the optimizers of all data-parallel ranks, as after a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.megatron.core_version import main_shard
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.streamed_adamw import MOMENTS, StreamedAdamW
from verl_mg.sharding.boxes import box_shape, contiguous_boxes, full_box, numel
from verl_mg.training.storages import Snapshot, storages
from verl_mg.training.weights import WEIGHTS, stored_boxes


def gradient_buffers(runner: MegatronRunner) -> Iterator[Tensor]:
    """Yields the flat gradient buffers of a trained model on this rank."""
    for buffer in parameter_buffers(runner):
        yield buffer.grad_data


def parameter_buffers(runner: MegatronRunner) -> Iterator[Any]:
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


def optimizer_storages(runner: MegatronRunner, optimizer: Any) -> list[UntypedStorage]:
    """Returns the storages of the optimizer state on the model's device that are not the weights themselves."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in runner.model_tensors()}
    devices = {tensor.device for tensor in runner.model_tensors()}
    on_device = (tensor for tensor in _optimizer_tensors(optimizer) if tensor.device in devices)
    # On a CPU rank moments in a mapped file have the model's device too, and memory that cannot be freed.
    on_device = (tensor for tensor in on_device if tensor.untyped_storage().resizable())
    return storages(tensor for tensor in on_device if tensor.untyped_storage().data_ptr() not in weights)


def updated_storages(runner: MegatronRunner, optimizer: Any) -> list[UntypedStorage]:
    """Returns the storages that an update writes, except gradients; frozen weights are not among them."""
    frozen = {id(weight) for chunk in runner.chunks for weight in chunk.parameters() if not weight.requires_grad}
    updated = (tensor for tensor in runner.model_tensors() if id(tensor) not in frozen)
    return storages(chain(updated, _optimizer_tensors(optimizer)))


def snapshot(runner: MegatronRunner, optimizer: Any) -> Snapshot:
    """Returns an empty snapshot of the weights and the optimizer state of a model."""
    return Snapshot(partial(updated_storages, runner, optimizer), partial(inner_optimizers, optimizer))


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            yield from group["params"]
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def optimizer_state(runner: MegatronRunner, optimizer: Any) -> Iterator[StoredBox]:
    """Yields this rank's share of the weights, in the optimizer's precision, and of the moments if there are any."""
    # Data-parallel ranks have different shares. Tensor-parallel ranks have the same share of tensors that are
    # replicated on them, such as norms. Biases of routers, which the optimizer does not have, are whole on every
    # rank.
    shards = runner.trained_shards()
    for name, parameter in runner.trained().items():
        shard = shards[name]
        if not parameter.requires_grad:
            yield from stored_boxes(WEIGHTS, shard, parameter, full_box(tuple(parameter.shape)))
        for namespace, values, start in _local_ranges(optimizer, parameter):
            for box in contiguous_boxes(tuple(parameter.shape), start, start + len(values)):
                in_box, values = values[: numel(box)], values[numel(box) :]
                yield from stored_boxes(namespace, shard, in_box.view(box_shape(box)), box)


@torch.no_grad()
def weights_from_optimizer(runner: MegatronRunner, optimizer: Any) -> None:
    """Sets the model's weights from the optimizers of all data-parallel ranks; all ranks of the model call it."""
    for parameter in runner.trained().values():
        for namespace, values, start in _local_ranges(optimizer, parameter):
            if namespace == WEIGHTS:
                parameter.detach().view(-1)[start : start + len(values)] = values
    with runner.groups.active():
        for chunk in runner.model_chunks:
            # With `overlap_param_gather` it would only start the gathers.
            chunk.start_param_sync(force_sync=True)  # type: ignore[operator]
    gathered = {id(parameter) for buffer in parameter_buffers(runner) for parameter in buffer.params}
    runner.unrestored -= {
        name for name, parameter in runner.trained().items() if id(parameter) in gathered or not parameter.requires_grad
    }


def make_moments(optimizer: Any, steps: float) -> None:
    """Creates zero moments with the structure that they have after `steps` steps."""
    for inner in inner_optimizers(optimizer):
        counts_by_weight = isinstance(inner, torch.optim.Adam)  # other optimizers count in their parameter groups
        for group in inner.param_groups:
            if not counts_by_weight:
                group["step"] = int(steps)
            for weight in group["params"]:
                if isinstance(inner, StreamedAdamW):
                    inner.state[weight] = inner.new_state(weight, steps)
                    continue
                zeros = {name: torch.zeros_like(weight) for name in MOMENTS}
                # Where torch's own first step would put it: fused kernels read the count on the device.
                count = torch.tensor(steps, device=weight.device if group.get("fused") else None)
                inner.state[weight] = zeros | ({"step": count} if counts_by_weight else {})


def steps_taken(optimizer: Any) -> float | None:
    """Returns the number of steps in the moments; None before the first."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            for weight in group["params"]:
                if weight in inner.state:
                    return float(inner.state[weight].get("step", group.get("step", 0)))
    return None


def _local_ranges(optimizer: Any, parameter: Tensor) -> Iterator[tuple[str, Tensor, int]]:
    """Yields (namespace, flat values, their start in the flattened parameter) of this rank's optimizer shards."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        located = main_shard(part, parameter)
        if located is not None:
            main, start = located
            yield WEIGHTS, main.detach(), start
            state = part.optimizer.state.get(main, {})
            yield from ((name, state[name], start) for name in MOMENTS if name in state)
