"""Checkpointable state of a trained model: weights and optimizer moments as boxes of Hugging Face tensors.

Megatron's distributed optimizer divides the flat memory of all parameters among the data-parallel ranks; a rank's part
of a parameter is a contiguous range of its elements, which is a few boxes. Each rank writes its boxes, nothing is
gathered. Under the same layout each rank reads them back, under another one the boxes that it needs instead. The
weights that the model computes with then come from the optimizers of all data-parallel ranks, as after a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.megatron.core_version import main_shard
from verl_mg.megatron.model_runner import ModelRunner
from verl_mg.megatron.storages import inner_optimizers, parameter_buffers
from verl_mg.megatron.streamed_adamw import MOMENTS, StreamedAdamW
from verl_mg.sharding.boxes import box_shape, contiguous_boxes, full_box, numel
from verl_mg.training.stored_weights import WEIGHTS, stored_boxes


def optimizer_state(runner: ModelRunner, optimizer: Any) -> Iterator[StoredBox]:
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
def weights_from_optimizer(runner: ModelRunner, optimizer: Any) -> None:
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
