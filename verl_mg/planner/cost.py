"""Predicted seconds of training and inference: micro-batches through the stages of a pipeline, then the optimizer.

    update = epochs x minibatches x (slowest stage x (m + (pp - 1) / vpp) + optimizer step)    m micro-batches

`layer_time` predicts a layer on a micro-batch. The constants are fitted on published figures, see `efficiency`.
"""

from __future__ import annotations

from verl_mg.layout import Layout
from verl_mg.planner.activations import micro_batches
from verl_mg.planner.inputs import GIGA, PlanInputs, packed
from verl_mg.planner.layer_time import (
    TERA,
    LayerKind,
    MicroBatch,
    backward_seconds,
    forward_seconds,
    head_seconds,
    layer_seconds,
    link_rate,
    repeated_seconds,
    stage_layers,
)
from verl_mg.planner.memory import FLOAT32_BYTES, micro_batch_bytes, sharded_module

HEAD_UPDATE = 4
"""Products of the output layer in an update, relative to inference: logits twice, their gradient's two products."""
HOST_STEP_BYTES = 28
"""Bytes that Adam on the host reads and writes for each parameter: weight, gradient and two moments, in float32."""


def bubble_share(inputs: PlanInputs, layout: Layout) -> float:
    """Returns the idle share of a step, (pp - 1) / (vpp m + pp - 1), m micro-batches (arXiv:2104.04473, 2.2)."""
    idle = layout.pp - 1
    return idle / (layout.vpp * micro_batches(inputs, layout) + idle)


def train_seconds(inputs: PlanInputs, layout: Layout) -> float:
    """Predicts the seconds of all optimizer steps of one iteration."""
    seconds = _through_stages(layout, micro_batch_seconds(inputs, layout, True), micro_batches(inputs, layout))
    return inputs.epochs * inputs.minibatches * (seconds + optimizer_seconds(inputs, layout))


def utilization(inputs: PlanInputs, layout: Layout, seconds: float) -> float:
    """Returns the model FLOP/s of updates relative to the peak of their devices (MFU), without recomputation."""
    samples, flops = inputs.tokens_per_iteration / inputs.lengths.mean, inputs.size.row_flops
    a_sample = flops.per_token * inputs.lengths.mean + flops.per_pair * inputs.lengths.mean_square
    # A backward pass has twice the FLOPs of a forward pass.
    return 3 * inputs.epochs * samples * a_sample / (seconds * layout.ranks * inputs.peak * TERA)


def inference_seconds(inputs: PlanInputs, layout: Layout) -> float:
    """Predicts the seconds of one forward pass over an iteration's tokens: log-probabilities or values."""
    count = micro_batches(inputs, layout) * inputs.minibatches
    return _through_stages(layout, micro_batch_seconds(inputs, layout, False), count)


def _through_stages(layout: Layout, seconds: float, count: int) -> float:
    """Returns the seconds of `count` micro-batches and of the (pp - 1) / vpp that fill and drain the pipeline."""
    return seconds * (count + (layout.pp - 1) / layout.vpp)


def _mean_micro_batch(inputs: PlanInputs, layout: Layout) -> MicroBatch:
    """Returns the mean micro-batch of an iteration."""
    # Ranks that share experts wait in every layer for the one with the most tokens, and with the FSDP backend all
    # ranks that share weights do. It is then the mean of the longest micro-batches.
    spread = inputs.lengths
    count = micro_batches(inputs, layout) * inputs.minibatches
    samples = inputs.tokens_per_iteration / spread.mean / layout.dp / count
    # Data-parallel indices whose ranks share experts: expert groups span tp * cp ranks of each of them.
    waiting = min(layout.dp, max(1, layout.ep * layout.etp // (layout.tp * layout.cp)))
    waiting = layout.dp if inputs.options.fsdp else waiting
    longest = packed(spread, inputs.micro_batch).longest_of(waiting) if waiting > 1 else 1.0
    return MicroBatch(samples * spread.mean * longest, samples * spread.mean_square * longest)


def micro_batch_seconds(inputs: PlanInputs, layout: Layout, trains: bool) -> float:
    """Predicts the seconds of a mean micro-batch, of a forward pass or of an update, on the slowest pipeline stage."""
    seconds = max(stage_seconds(inputs, layout, trains)) + _between_stages(inputs, layout, trains)
    if inputs.options.fsdp:
        seconds += exposed_seconds(inputs, layout, trains, seconds)
    return seconds


def update_parts(inputs: PlanInputs, layout: Layout) -> tuple[list[float], float]:
    """Predicts the seconds of each layer and of the output layer for the mean micro-batch of an update."""
    c, (a_layer, head) = inputs.weights.config, _parts(inputs, layout, True)
    return [a_layer[LayerKind.of(c, layer)] for layer in range(c.layers)], head


def stage_seconds(inputs: PlanInputs, layout: Layout, trains: bool = True) -> list[float]:
    """Predicts the seconds that each pipeline stage computes for the mean micro-batch."""
    a_layer, head = _parts(inputs, layout, trains)
    counts = stage_layers(inputs.weights.config, layout)
    stages = [sum(count * a_layer[kind] for kind, count in layers.items()) for layers in counts]
    stages[-1] += head
    return stages


def _parts(inputs: PlanInputs, layout: Layout, trains: bool) -> tuple[dict[LayerKind, float], float]:
    """Predicts the seconds of a layer of each kind, and of the output layer."""
    # Once for each kind of layer: the layers of a kind differ in nothing that a plan counts.
    micro = _mean_micro_batch(inputs, layout)
    a_layer: dict[LayerKind, float] = {}
    for kind in {kind for stage in stage_layers(inputs.weights.config, layout) for kind in stage}:
        part, blocks = layer_seconds(inputs, layout, micro, kind), 1 if kind.experts else 2
        a_layer[kind] = forward_seconds(inputs, part, blocks)
        if trains:
            a_layer[kind] += repeated_seconds(inputs, part, blocks) + backward_seconds(inputs, part, blocks)
    return a_layer, head_seconds(inputs, layout, micro) * (HEAD_UPDATE if trains else 1)


def _between_stages(inputs: PlanInputs, layout: Layout, trains: bool) -> float:
    """Predicts the seconds of sending hidden states to the next stage, and their gradients back."""
    if layout.pp == 1:
        return 0.0
    tokens = _mean_micro_batch(inputs, layout).tokens
    size = tokens / (layout.cp * layout.tp) * inputs.weights.config.hidden * inputs.options.weight_bytes
    # Two stages are the span of the link.
    return (1 + trains) * layout.vpp * size / link_rate(inputs, 2 * layout.ranks // layout.pp)


def optimizer_seconds(inputs: PlanInputs, layout: Layout) -> float:
    """Predicts the seconds of an optimizer step: collectives that nothing overlaps, and the step itself."""
    # Gradients are reduce-scattered and bf16 weights all-gathered, over dp * cp, for experts over edp; with the FSDP
    # backend in each micro-batch instead.
    options = inputs.options
    if options.fsdp:
        return _step_seconds(inputs, layout)
    reduced, gathered = (
        _data_parallel(inputs, layout, size) for size in (options.gradient_bytes, options.weight_bytes)
    )
    if options.overlap_gradients or options.overlap_weights:
        # Overlapped are the last backward pass, of twice a forward pass, and the first forward pass.
        forward = micro_batch_seconds(inputs, layout, False)
        reduced = max(0.0, reduced - 2 * forward) if options.overlap_gradients else reduced
        gathered = max(0.0, gathered - forward) if options.overlap_weights else gathered
    return reduced + gathered + _step_seconds(inputs, layout)


def _data_parallel(inputs: PlanInputs, layout: Layout, item: int) -> float:
    """Predicts the seconds of moving `item` bytes of each parameter between the ranks that share it."""
    dense, experts = _local_elements(inputs, layout)
    # A rank sends and receives all parts but one of the group's. A group spans its size times the distance of its
    # ranks.
    groups = ((dense, layout.dp * layout.cp, layout.tp), (experts, layout.edp, layout.ep * layout.etp))
    return sum(size * item * (1 - 1 / n) / link_rate(inputs, n * distance) for size, n, distance in groups)


def _local_elements(inputs: PlanInputs, layout: Layout) -> tuple[float, float]:
    """Returns the mean number of elements on a rank, outside of experts and in them."""
    dense = (inputs.size.elements - inputs.size.experts) / (layout.pp * layout.tp)
    return dense, inputs.size.experts / (layout.pp * layout.ep * layout.etp)


def _step_seconds(inputs: PlanInputs, layout: Layout) -> float:
    """Predicts the seconds of the step on a rank's states: bytes of its memory, of the host, and Muon's products."""
    options = inputs.options
    dense, experts = _local_elements(inputs, layout)
    states = dense / (layout.dp * layout.cp) + experts / layout.edp
    if options.fsdp:  # gradients are sharded too
        states, dense, experts = float(sharded_module(inputs, layout).trained), 0.0, 0.0
    away = options.offloaded_states
    # States are read and written, gradients read, weights written; the norm reads all gradients of a rank.
    moved = states * (1 - away) * (2 * options.state_bytes + options.gradient_bytes + options.weight_bytes)
    norms = 2 * (dense + experts) * options.gradient_bytes
    on_host = states * options.host_steps * (HOST_STEP_BYTES + options.gradient_bytes + options.weight_bytes)
    # Data-parallel ranks distribute the matrices that they orthogonalize.
    muon = inputs.size.muon_flops / layout.ranks if options.muon else 0.0
    products = muon / (inputs.flops * TERA)
    return (moved + norms) / (inputs.memory_bandwidth * GIGA) + on_host / (inputs.host * GIGA) + products


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
