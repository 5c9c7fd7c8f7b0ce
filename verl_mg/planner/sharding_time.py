"""Predicted seconds of the collectives of the FSDP backend, which overlap with the computation of layers."""

from __future__ import annotations

from verl_mg.layout import Layout
from verl_mg.planner.inputs import GIGA, PlanInputs
from verl_mg.planner.layer_time import link_rate
from verl_mg.planner.module_memory import FLOAT32_BYTES, micro_batch_bytes, sharded_module


def exposed_seconds(inputs: PlanInputs, layout: Layout, trains: bool, computed: float) -> float:
    """Predicts the seconds of a micro-batch in which ranks wait for weights and gradients."""
    # The first weights are needed before anything is computed; of all else what exceeds the `computed` seconds
    # counts.
    module, options = sharded_module(inputs, layout), inputs.options
    sizes = micro_batch_bytes(inputs, layout, trains)
    others = 1 - 1 / module.sharding
    near, far = link_rate(inputs, module.sharding * layout.tp), link_rate(inputs, layout.ranks)
    seconds = (sizes.gathered + sizes.reduced) * others / near
    assert options.fsdp
    # A sum over copies is a reduce-scatter and an all-gather.
    if sizes.replicated:
        seconds += 2 * sizes.replicated * (1 - 1 / options.fsdp.replicas) / far
    if options.fsdp.cpu_offload:  # each gather begins with a copy from the host, and gradients end there
        stored = FLOAT32_BYTES * sizes.gathered / options.weight_bytes + sizes.reduced
        seconds += stored / module.sharding / (GIGA * inputs.host)
    first = options.weight_bytes * module.sharding * module.rest.sharded * others / near
    return min(seconds, first + max(0.0, seconds - first - computed))
