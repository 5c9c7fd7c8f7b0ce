"""Predicted seconds of training, inference and generation: an uncalibrated score that ranks layouts.

Uneven experts, launch times of kernels and overlap of computation with communication are left out, because they hardly
differ between layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_mg.layout import EngineLayout, Layout
from verl_mg.planner.inputs import GIGA, WEIGHT_BYTES, PlanInputs
from verl_mg.planner.memory import GRADIENT_BYTES, RolloutMemory, micro_batches

TERA = 1e12
ALL_REDUCE_SECONDS = {True: 1e-5, False: 4e-5}
"""Seconds of an all-reduce of a small message, by whether it stays within a node. Uncalibrated."""


@dataclass(frozen=True)
class Work:
    """Computation and communication per token."""

    passes: int
    """FLOPs, as a multiple of a forward pass."""
    gathers: int
    """Collectives around tensor-parallel layers (Korthikanti et al., arXiv:2205.05198, section 4.2.2)."""
    exchanges: int
    """Exchanges of attention over context-parallel ranks."""
    dispatches: int
    """Exchanges of tokens with experts, in either direction."""


INFERENCE = Work(passes=1, gathers=2, exchanges=1, dispatches=2)
UPDATE = {False: Work(3, 5, 2, 4), True: Work(4, 7, 3, 6)}
"""Work of an update, by whether the forward pass is repeated in the backward pass."""


def bubble_share(inputs: PlanInputs, layout: Layout) -> float:
    """Returns the fraction of a step in which a pipeline stage is idle: (pp - 1) / (vpp m + pp - 1), m micro-batches.

    Narayanan et al. (arXiv:2104.04473), section 2.2, as a fraction of the whole step.

    Args:
        inputs: inputs of the plan for the role.
        layout: layout of the role.
    """
    idle = layout.pp - 1
    return idle / (layout.vpp * micro_batches(inputs, layout) + idle)


def train_seconds(inputs: PlanInputs, layout: Layout) -> float:
    """Predicts the seconds of forward and backward passes and optimizer collectives over one iteration's tokens.

    fullest stage * ((3 forward passes' FLOPs, 4 with recomputation, + traffic within tensor-, context- and
    expert-parallel groups) / (1 - bubble) + gradients and weights through the distributed optimizer, at each of its
    steps), in each epoch.

    Args:
        inputs: inputs of the plan for the role.
        layout: layout of the role.
    """
    epoch = _seconds(inputs, layout, UPDATE[inputs.recompute]) + inputs.minibatches * optimizer_seconds(inputs, layout)
    return inputs.epochs * epoch * fullest_stage(inputs, layout)


def inference_seconds(inputs: PlanInputs, layout: Layout) -> float:
    """Predicts the seconds of one forward pass over an iteration's tokens: log-probabilities or values.

    Args:
        inputs: inputs of the plan for the role.
        layout: layout of the role.
    """
    return _seconds(inputs, layout, INFERENCE) * fullest_stage(inputs, layout)


def _seconds(inputs: PlanInputs, layout: Layout, work: Work) -> float:
    tokens = inputs.tokens_per_iteration / layout.dp
    flops = inputs.row_flops(inputs.sequence) * tokens / inputs.sequence
    return working_seconds(inputs, layout, work, flops, tokens) / (1 - bubble_share(inputs, layout))


def working_seconds(inputs: PlanInputs, layout: Layout, work: Work, flops: float, tokens: float) -> float:
    """Predicts the seconds of the ranks of one data-parallel index, without the pipeline bubble.

    Args:
        inputs: inputs of the plan for the role.
        layout: layout of the role.
        work: computation and communication per token.
        flops: FLOPs of a forward pass over the tokens.
        tokens: number of tokens.
    """
    index = layout.tp * layout.pp * layout.cp
    compute = work.passes * flops / (index * inputs.flops * TERA)
    local = tokens / layout.cp
    gathering = _tensor_parallel(inputs, layout, work.gathers, local)
    exchanging = _context_parallel(inputs, layout, work.exchanges, local)
    return compute + gathering + exchanging + _expert_parallel(inputs, layout, work.dispatches, local / layout.tp)


def fullest_stage(inputs: PlanInputs, layout: Layout) -> float:
    """Returns the largest number of layers of a stage over the mean: the other stages wait for that stage.

    Args:
        inputs: inputs of the plan for the role.
        layout: layout of the role.
    """
    layers = inputs.weights.config.layers
    most = max(
        sum(len(layout.layers(layers, stage, chunk)) for chunk in range(layout.vpp)) for stage in range(layout.pp)
    )
    return most * layout.pp / layers


def _tensor_parallel(inputs: PlanInputs, layout: Layout, rounds: int, tokens: float) -> float:
    """Predicts the seconds of gathering and scattering hidden states around attention and dense feed-forward layers.

    A rank receives (tp - 1) / tp of a micro-batch's hidden states in each of the rounds.
    """
    c = inputs.weights.config
    mixtures = len(c.experts.layers) if c.experts else 0
    blocks = 2 * c.layers - mixtures
    received = rounds * blocks / layout.pp * tokens * c.hidden * WEIGHT_BYTES * (1 - 1 / layout.tp)
    return received / _rate(inputs, layout.tp)


def _context_parallel(inputs: PlanInputs, layout: Layout, rounds: int, tokens: float) -> float:
    """Predicts the seconds of exchanging tokens for heads and back around attention (Ulysses, arXiv:2309.14509).

    A rank keeps 1 / cp of its part; `rounds` counts forward and backward passes.
    """
    c = inputs.weights.config
    width = 2 * (c.heads + c.kv_heads) * c.head_dim / layout.tp
    received = rounds * c.layers / layout.pp * tokens * width * WEIGHT_BYTES * (1 - 1 / layout.cp)
    return received / _rate(inputs, layout.tp * layout.cp)


def _expert_parallel(inputs: PlanInputs, layout: Layout, rounds: int, tokens: float) -> float:
    """Predicts the seconds of dispatching and combining every token's top_k copies, each a round.

    Copies are sent to their expert's rank over ep, and from there to the other etp - 1 ranks that shard it.
    """
    c = inputs.weights.config
    if c.experts is None:
        return 0.0
    copies = rounds * len(c.experts.layers) / layout.pp * tokens * c.experts.top_k
    outside = max(0.0, 1 - inputs.node / (layout.ep * layout.etp))
    inside = 1 - 1 / layout.ep - outside
    seconds = outside / (GIGA * inputs.inter_node) + inside / (GIGA * inputs.intra_node)
    return copies * c.hidden * WEIGHT_BYTES * (seconds + (layout.etp - 1) / _rate(inputs, layout.etp))


def optimizer_seconds(inputs: PlanInputs, layout: Layout) -> float:
    """Predicts the seconds of an optimizer step's collectives.

    float32 gradients are reduce-scattered and bf16 weights all-gathered, over dp * cp and, those of experts, over edp.

    Args:
        inputs: inputs of the plan for the role.
        layout: layout of the role.
    """
    dense = (inputs.elements - inputs.expert_elements) / (layout.pp * layout.tp)
    experts = inputs.expert_elements / (layout.pp * layout.ep * layout.etp)
    seconds = 0.0
    for size, group, rank_distance in (
        (dense, layout.dp * layout.cp, layout.tp),
        (experts, layout.edp, layout.ep * layout.etp),
    ):
        seconds += size * (GRADIENT_BYTES + WEIGHT_BYTES) * (1 - 1 / group) / _rate(inputs, group * rank_distance)
    return seconds


def rollout_seconds(inputs: PlanInputs, layout: EngineLayout, memory: RolloutMemory) -> float:
    """Predicts the seconds of generating one iteration's samples, all of full length.

    As many samples run together as the KV cache can contain. A decoding step reads the weights that they use and half
    of their cache (Pope et al., arXiv:2211.05102, section 2), or computes for longer than that, and waits for two
    all-reduces per layer of the samples' hidden states. With pipeline parallelism each stage reads its weights pp times
    per step, each time for 1 / pp of the samples.

    Args:
        inputs: inputs of the plan.
        layout: layout of an engine.
        memory: memory of an engine.
    """
    samples = inputs.tokens_per_iteration / inputs.sequence * layout.ranks / len(inputs.engine_ranks)
    running = max(1.0, min(samples, samples_at_once(inputs, layout, memory)))
    step = decode_seconds(inputs, layout, memory, running, running * inputs.sequence / 2)
    return max(1.0, samples / running) * inputs.sequence * step


def decode_seconds(
    inputs: PlanInputs, layout: EngineLayout, memory: RolloutMemory, running: float, cached: float
) -> float:
    """Predicts the seconds of one decoding step of an engine.

    Args:
        inputs: inputs of the plan.
        layout: layout of the engine.
        memory: memory of the engine.
        running: number of samples that get one token each.
        cached: tokens of all of them together in the KV cache.
    """
    c = inputs.weights.config
    per_token = c.experts.top_k / c.experts.count if c.experts else 1.0
    used = 1 - (1 - per_token) ** (running / layout.pp)  # fraction of experts that any of the tokens is routed to
    reads = [
        layout.pp * WEIGHT_BYTES * (e.dense + used * e.experts) + cached / layout.adp * each
        for e, each in zip(memory.elements, memory.per_token, strict=True)
    ]
    compute = 2 * inputs.active_elements * running / (layout.ranks * inputs.flops * TERA)
    reading = max(reads) / (inputs.memory_bandwidth * GIGA)
    return max(reading, compute) + 2 * c.layers * _all_reduce(inputs, layout.tp, running)


def samples_at_once(inputs: PlanInputs, layout: EngineLayout, memory: RolloutMemory) -> int:
    """Returns the number of samples of full length that an engine generates at the same time.

    Args:
        inputs: inputs of the plan.
        layout: layout of the engine.
        memory: memory of the engine.
    """
    capacity = memory.tokens // inputs.sequence * layout.adp
    return min(capacity, inputs.max_running_requests) if inputs.max_running_requests else capacity


def _all_reduce(inputs: PlanInputs, tp: int, tokens: float) -> float:
    """Predicts the seconds of summing hidden states of tokens: latency and 2 (tp - 1) / tp of their bytes."""
    if tp == 1:
        return 0.0
    size = tokens * inputs.weights.config.hidden * WEIGHT_BYTES
    return ALL_REDUCE_SECONDS[tp <= inputs.node] + 2 * (1 - 1 / tp) * size / _rate(inputs, tp)


def _rate(inputs: PlanInputs, reach: int) -> float:
    """Returns the bytes per second between ranks of a group that spans `reach` consecutive ranks."""
    return GIGA * (inputs.intra_node if reach <= inputs.node else inputs.inter_node)
