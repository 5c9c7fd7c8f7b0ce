"""Predicted seconds of generation: decoding steps of continuous batching over a spread of lengths."""

from __future__ import annotations

from verl_mg.layout import EngineLayout
from verl_mg.planner.inputs import GIGA, WEIGHT_BYTES, PlanInputs
from verl_mg.planner.layer_time import TERA, link_rate
from verl_mg.planner.memory import RolloutMemory

PARTS = 12  # number of parts of the decoding steps in which the number of running samples is taken as constant

NEAR_RANKS = 8
"""Ranks of an all-reduce for which engines have a kernel of low latency, at most; beyond that they use NCCL."""


def rollout_seconds(inputs: PlanInputs, layout: EngineLayout, memory: RolloutMemory) -> float:
    """Predicts the seconds of generating one iteration's samples."""
    # As many samples run together as the KV cache can contain, and a waiting one takes the place of each that is
    # complete. When none waits, the engine continues with fewer and fewer samples until the longest is complete,
    # unless it begins samples of the next iteration (`batches_in_flight`).
    spread, flying = inputs.lengths, inputs.batches_in_flight
    samples = inputs.tokens_per_iteration / spread.mean * layout.ranks / len(inputs.engine_ranks)
    running = max(1.0, min(max(1, flying) * samples, samples_at_once(inputs, layout, memory)))
    # In the steady state samples are at all places of their responses: in the mean, half of it is in the cache.
    half_done = running * (spread.prompt + spread.mean_response / 2)
    full = decode_seconds(inputs, layout, memory, running, half_done)
    waiting = samples if flying else max(0.0, samples - running)
    # Prompts are computed at the speed of large products, without the latencies of decoding steps.
    prefill = samples * inputs.row_flops(spread.prompt) / (layout.ranks * inputs.flops * TERA)
    steady = prefill + waiting / running * spread.mean_response * full
    return steady if flying else steady + _until_complete(inputs, layout, memory, running)


def _until_complete(inputs: PlanInputs, layout: EngineLayout, memory: RolloutMemory, running: float) -> float:
    """Predicts the seconds in which `running` samples that begin together become complete."""
    spread, seconds = inputs.lengths, 0.0
    steps = spread.longest_response / PARTS  # each part is predicted by its middle
    for part in range(PARTS):
        step = (part + 0.5) * steps
        left = max(1.0, running * spread.unfinished(step))
        seconds += steps * decode_seconds(inputs, layout, memory, left, left * (spread.prompt + step))
    return seconds


def decode_seconds(
    inputs: PlanInputs, layout: EngineLayout, memory: RolloutMemory, running: float, cached: float
) -> float:
    """Predicts the seconds of one decoding step of an engine: `running` samples with `cached` tokens of all together.

    It reads the weights that the samples use and their cache (Pope et al., arXiv:2211.05102, section 2), or computes
    for longer than that, and waits for latencies of every layer and two all-reduces. With pipeline parallelism each
    stage reads its weights pp times per step, each time for 1 / pp of the samples.
    """
    c, e = inputs.weights.config, inputs.efficiency
    per_token = c.experts.top_k / c.experts.count if c.experts else 1.0
    # Each of the pp groups of samples passes a stage by itself, which reads only the experts of the group's tokens.
    used = 1 - (1 - per_token) ** (running / layout.pp)  # fraction of experts that any of the tokens is routed to
    reads = [
        layout.pp * (part.dense + used * part.experts) + cached / layout.adp * each
        for part, each in zip(memory.stages, memory.per_token, strict=True)
    ]
    compute = 2 * inputs.active_elements * running / (layout.ranks * inputs.flops * TERA)
    reading = max(reads) / (inputs.memory_bandwidth * GIGA)
    waiting = (
        e.decode_step
        + e.decode_sample * running
        + c.layers * (e.decode_layer + 2 * _all_reduce(inputs, layout.tp, running))
    )
    return max(reading, compute) + waiting


def samples_at_once(inputs: PlanInputs, layout: EngineLayout, memory: RolloutMemory) -> int:
    """Returns the number of samples of mean length that an engine generates at the same time."""
    capacity = int(memory.tokens // inputs.lengths.mean) * layout.adp
    return min(capacity, inputs.max_running_requests) if inputs.max_running_requests else capacity


def _all_reduce(inputs: PlanInputs, tp: int, tokens: float) -> float:
    """Predicts the seconds of summing hidden states of tokens: latency and 2 (tp - 1) / tp of their bytes."""
    if tp == 1:
        return 0.0
    size = tokens * inputs.weights.config.hidden * WEIGHT_BYTES
    near = tp <= min(inputs.node, NEAR_RANKS)
    latency = inputs.efficiency.all_reduce_near if near else inputs.efficiency.all_reduce_far
    return latency + 2 * (1 - 1 / tp) * size / link_rate(inputs, tp)
