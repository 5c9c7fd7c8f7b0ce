"""Predicted seconds of an iteration's training and generation: a score that ranks layouts, not a promise.

Uneven experts, kernels' launch times and overlap of computing with communication are left out, because they hardly
tell one layout from another.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_mg.layout import EngineLayout, Layout
from verl_mg.planner.inputs import GIGA, WEIGHT_BYTES, PlanInputs
from verl_mg.planner.memory import GRADIENT_BYTES, RolloutMemory, micro_batches

TERA = 1e12
ALL_REDUCE_SECONDS = {True: 1e-5, False: 4e-5}  # of a small message, within a node and across nodes


@dataclass(frozen=True)
class Work:
    """What is done with a token, in forward passes' FLOPs and in rounds of collectives of its hidden states.

    gathers: around tensor-parallel layers (Korthikanti et al., arXiv:2205.05198, section 4.2.2). exchanges: of
    attention over context-parallel ranks. dispatches: to experts and back.
    """

    passes: int
    gathers: int
    exchanges: int
    dispatches: int


INFERENCE = Work(passes=1, gathers=2, exchanges=1, dispatches=2)
UPDATE = {False: Work(3, 5, 2, 4), True: Work(4, 7, 3, 6)}
"""By whether the forward pass is repeated in the backward pass."""


def bubble_share(setting: PlanInputs, layout: Layout) -> float:
    """Share of a step in which a pipeline stage waits: (pp - 1) / (vpp m + pp - 1), m micro-batches.

    Narayanan et al. (arXiv:2104.04473), section 2.2, as a share of the whole step.
    """
    idle = layout.pp - 1
    return idle / (layout.vpp * micro_batches(setting, layout) + idle)


def train_seconds(setting: PlanInputs, layout: Layout) -> float:
    """Forward, backward and the optimizer's collectives over one iteration's tokens.

    fullest stage * ((3 forward passes' FLOPs, 4 with recomputation, + traffic within tensor-, context- and
    expert-parallel groups) / (1 - bubble) + gradients and weights through the distributed optimizer, at each of its
    steps), in each epoch.
    """
    epoch = _seconds(setting, layout, UPDATE[setting.recompute]) + setting.minibatches * optimizer_seconds(
        setting, layout
    )
    return setting.epochs * epoch * fullest_stage(setting, layout)


def inference_seconds(setting: PlanInputs, layout: Layout) -> float:
    """One forward pass over an iteration's tokens: log-probabilities or values."""
    return _seconds(setting, layout, INFERENCE) * fullest_stage(setting, layout)


def _seconds(setting: PlanInputs, layout: Layout, work: Work) -> float:
    tokens = setting.batch / layout.dp
    flops = setting.row_flops(setting.sequence) * tokens / setting.sequence
    return working_seconds(setting, layout, work, flops, tokens) / (1 - bubble_share(setting, layout))


def working_seconds(setting: PlanInputs, layout: Layout, work: Work, flops: float, tokens: float) -> float:
    """Of the ranks of one data-parallel index, for tokens whose forward pass takes so many FLOPs, without a bubble."""
    index = layout.tp * layout.pp * layout.cp
    compute = work.passes * flops / (index * setting.flops * TERA)
    local = tokens / layout.cp
    gathering = _tensor_parallel(setting, layout, work.gathers, local)
    exchanging = _context_parallel(setting, layout, work.exchanges, local)
    return compute + gathering + exchanging + _expert_parallel(setting, layout, work.dispatches, local / layout.tp)


def fullest_stage(setting: PlanInputs, layout: Layout) -> float:
    """Layers of the pipeline stage with the most, over the mean: the others wait for it."""
    layers = setting.weights.config.layers
    most = max(
        sum(len(layout.layers(layers, stage, chunk)) for chunk in range(layout.vpp)) for stage in range(layout.pp)
    )
    return most * layout.pp / layers


def _tensor_parallel(setting: PlanInputs, layout: Layout, rounds: int, tokens: float) -> float:
    """Gathers and scatters of hidden states around attention and each dense feed-forward layer.

    A rank receives (tp - 1) / tp of a micro-batch's hidden states in each of the rounds.
    """
    c = setting.weights.config
    mixtures = len(c.experts.layers) if c.experts else 0
    blocks = 2 * c.layers - mixtures
    received = rounds * blocks / layout.pp * tokens * c.hidden * WEIGHT_BYTES * (1 - 1 / layout.tp)
    return received / _rate(setting, layout.tp)


def _context_parallel(setting: PlanInputs, layout: Layout, rounds: int, tokens: float) -> float:
    """Queries, keys, values and outputs of attention change from tokens to heads and back (Ulysses, arXiv:2309.14509).

    A rank keeps a cp-th of its part; rounds: a forward or a backward pass is one.
    """
    c = setting.weights.config
    width = 2 * (c.heads + c.kv_heads) * c.head_dim / layout.tp
    received = rounds * c.layers / layout.pp * tokens * width * WEIGHT_BYTES * (1 - 1 / layout.cp)
    return received / _rate(setting, layout.tp * layout.cp)


def _expert_parallel(setting: PlanInputs, layout: Layout, rounds: int, tokens: float) -> float:
    """Dispatch and combine of every token's top_k copies, each a round.

    Copies go to their expert's rank over ep, and from there to the other etp - 1 ranks that cut it.
    """
    c = setting.weights.config
    if c.experts is None:
        return 0.0
    copies = rounds * len(c.experts.layers) / layout.pp * tokens * c.experts.top_k
    outside = max(0.0, 1 - setting.node / (layout.ep * layout.etp))
    inside = 1 - 1 / layout.ep - outside
    seconds = outside / (GIGA * setting.inter_node) + inside / (GIGA * setting.intra_node)
    return copies * c.hidden * WEIGHT_BYTES * (seconds + (layout.etp - 1) / _rate(setting, layout.etp))


def optimizer_seconds(setting: PlanInputs, layout: Layout) -> float:
    """Of one step: float32 gradients are reduced and scattered, bf16 weights gathered, over dp*cp and over edp."""
    dense = (setting.elements - setting.expert_elements) / (layout.pp * layout.tp)
    experts = setting.expert_elements / (layout.pp * layout.ep * layout.etp)
    seconds = 0.0
    for size, group, apart in (
        (dense, layout.dp * layout.cp, layout.tp),
        (experts, layout.edp, layout.ep * layout.etp),
    ):
        seconds += size * (GRADIENT_BYTES + WEIGHT_BYTES) * (1 - 1 / group) / _rate(setting, group * apart)
    return seconds


def rollout_seconds(setting: PlanInputs, layout: EngineLayout, memory: RolloutMemory) -> float:
    """Generation of one iteration's samples, all of full length, token after token.

    Samples run together as far as the KV cache has room for them; a decoding step reads the weights that they meet
    and half of their cache (Pope et al., arXiv:2211.05102, section 2), or computes for longer than that, and waits
    for two all-reduces a layer of the samples' hidden states. With pipeline parallelism each stage reads its weights
    pp times a step, for a pp-th of the samples each.
    """
    samples = setting.batch / setting.sequence * layout.ranks / len(setting.engine_ranks)
    running = max(1.0, min(samples, samples_at_once(setting, layout, memory)))
    step = decode_seconds(setting, layout, memory, running, running * setting.sequence / 2)
    return max(1.0, samples / running) * setting.sequence * step


def decode_seconds(
    setting: PlanInputs, layout: EngineLayout, memory: RolloutMemory, running: float, cached: float
) -> float:
    """One token for each of the `running` samples of an engine, which have `cached` tokens in its cache together."""
    c = setting.weights.config
    share = c.experts.top_k / c.experts.count if c.experts else 1.0
    met = 1 - (1 - share) ** (running / layout.pp)  # the share of experts that any of the tokens is routed to
    reads = [
        layout.pp * WEIGHT_BYTES * (e.dense + met * e.experts) + cached / layout.adp * each
        for e, each in zip(memory.elements, memory.per_token, strict=True)
    ]
    compute = 2 * setting.active_elements * running / (layout.ranks * setting.flops * TERA)
    reading = max(reads) / (setting.memory_bandwidth * GIGA)
    return max(reading, compute) + 2 * c.layers * _all_reduce(setting, layout.tp, running)


def samples_at_once(setting: PlanInputs, layout: EngineLayout, memory: RolloutMemory) -> int:
    """How many samples of full length an engine works on together."""
    room = memory.tokens // setting.sequence * layout.adp
    return min(room, setting.max_running_requests) if setting.max_running_requests else room


def _all_reduce(setting: PlanInputs, tp: int, tokens: float) -> float:
    """Seconds to sum the hidden states of so many tokens: latency and 2 (tp - 1) / tp of their bytes."""
    if tp == 1:
        return 0.0
    size = tokens * setting.weights.config.hidden * WEIGHT_BYTES
    return ALL_REDUCE_SECONDS[tp <= setting.node] + 2 * (1 - 1 / tp) * size / _rate(setting, tp)


def _rate(setting: PlanInputs, reach: int) -> float:
    """Bytes a second between ranks of a group that spans `reach` consecutive ranks."""
    return GIGA * (setting.intra_node if reach <= setting.node else setting.inter_node)
