"""Bytes on a rank of a role with the FSDP backend, and bytes of the collectives between the ranks that shard it.

What a rank stores is counted exactly; what is gathered at the same time is an estimate from torch's schedule: the layer
that computes and the next one, and in the backward pass the gradient of a layer before and after its cast to float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from verl_mg.config import FsdpConfig
from verl_mg.fsdp.sharded_module import ShardedModule, divided_module
from verl_mg.layout import Layout
from verl_mg.planner.activations import activation_bytes, inference_bytes
from verl_mg.planner.inputs import ACTIVATIONS, GATHERED, OPTIMIZER_STATES, PlanInputs
from verl_mg.sharding.module_table import ModuleTable

FLOAT32_BYTES = 4  # bytes of a stored weight that is trained, and of each gradient that is summed
LAYERS_IN_FLIGHT = 2  # layers that are gathered at the same time: one computes, the next one arrives


def sharded_module(inputs: PlanInputs, layout: Layout) -> ShardedModule:
    """Returns the module of a role under a layout; UserError where the layout does not divide it."""
    assert isinstance(inputs.weights, ModuleTable) and inputs.options.fsdp
    return _sharded_module(inputs.weights, layout, inputs.options.fsdp)


@cache  # equal for every batch and all hardware
def _sharded_module(table: ModuleTable, layout: Layout, options: FsdpConfig) -> ShardedModule:
    return ShardedModule(table, _divided_module, layout, options)


@cache  # equal for every layout with the same tp
def _divided_module(table: ModuleTable, tp: int) -> Any:
    return divided_module(table, tp)


def module_parts(inputs: PlanInputs, layout: Layout, is_trained: bool) -> dict[str, int]:
    """Computes the bytes of each part of a role's memory on a rank."""
    module, options = sharded_module(inputs, layout), inputs.options
    assert options.fsdp
    on_device = not options.fsdp.cpu_offload
    stored = FLOAT32_BYTES if is_trained else options.weight_bytes
    gathered = _gathered_bytes(module, options.weight_bytes, options.fsdp)
    # Buffers stay on the device, also with weights in host memory.
    parts = {"weights": on_device * stored * module.sharded + module.buffer_bytes}
    if not is_trained:
        return parts | {GATHERED: gathered, ACTIVATIONS: inference_bytes(inputs, layout, 0)}
    parts["gradients"] = on_device * options.gradient_bytes * module.trained
    parts[OPTIMIZER_STATES] = on_device * options.state_bytes * module.trained
    # A layer's gradients are cast when the backward pass has left it, all others at its end.
    rest = options.weight_bytes * module.sharding * module.rest.trained
    layer = max((group.trained for group in module.layers), default=0)
    cast = (options.weight_bytes + FLOAT32_BYTES) * module.sharding * layer
    at_end = FLOAT32_BYTES * module.sharding * module.rest.trained
    parts[GATHERED] = gathered + rest + max(cast, at_end)
    return parts | {ACTIVATIONS: activation_bytes(inputs, layout, 0)}


def _gathered_bytes(module: ShardedModule, item: int, options: FsdpConfig) -> int:
    """Returns the bytes of whole weights that are gathered at the same time; `item`: of one weight."""
    sizes = sorted((group.sharded for group in module.layers), reverse=True)
    layers = sizes[:LAYERS_IN_FLIGHT] if options.reshard_after_forward else sizes
    return item * module.sharding * (module.rest.sharded + sum(layers))


@dataclass(frozen=True)
class MicroBatchBytes:
    """Bytes of the collectives of one micro-batch, of whole tensors: a rank receives all but its own part."""

    gathered: int  # outputs of all-gathers, in the type in which the model computes
    reduced: int  # inputs of reduce-scatters, in float32
    replicated: int  # tensors that are summed over the copies of the model, in float32


def micro_batch_bytes(inputs: PlanInputs, layout: Layout, trains: bool = True) -> MicroBatchBytes:
    """Computes the bytes of the collectives between sharding ranks and between copies, for one micro-batch."""
    module, options = sharded_module(inputs, layout), inputs.options
    assert options.fsdp
    # Layers are gathered again for the backward pass, all else stays gathered between the passes.
    passes = 2 if trains and options.fsdp.reshard_after_forward else 1
    layers = sum(group.sharded for group in module.layers)
    gathered = options.weight_bytes * module.sharding * (passes * layers + module.rest.sharded)
    summed = FLOAT32_BYTES * module.trained if trains else 0
    copies = options.fsdp.replicas > 1
    return MicroBatchBytes(gathered, module.sharding * summed, summed if copies else 0)
