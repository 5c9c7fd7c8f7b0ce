"""Predicted seconds of one layer on a micro-batch, by part, and of a pass over a pipeline stage.

    seconds of a part = FLOPs / (reached TFLOP/s), or bytes / (reached GB/s), or a latency

The parts of a layer are computed one after the other, except for communication that an option overlaps with
computation: of it only what exceeds that computation counts. A backward pass repeats matrix products twice, attention
2.5 times and everything else twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from verl_mg.layout import Layout
from verl_mg.models.flops import layer_elements, pair_flops, state_flops
from verl_mg.models.hf_config import HFConfig
from verl_mg.planner.activations import LayerKind, kept_on_ranks
from verl_mg.planner.efficiency import UNFUSED
from verl_mg.planner.inputs import GIGA, PlanInputs

TERA = 1e12
LOGIT_BYTES = 4  # bytes of a logit
LOGIT_PASSES = 4
"""Times that float32 logits are written or read in a pass: product, maximum and sum, exponential, choice."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of the backward pass of fused attention, relative to its forward pass (arXiv:2307.08691, section 4.1)."""


@dataclass(frozen=True)
class MicroBatch:
    """Size of a micro-batch of one data-parallel index."""

    tokens: float
    pairs: float  # sum of the squared lengths of its rows


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of the forward pass over one layer, by part."""

    attention_linear: float  # projections of attention
    mla_up: float  # the part of the projections from compressed states to heads
    core_attention: float  # attention between projections
    mlp: float  # dense feed-forward layer and router
    experts: float
    shared: float
    elementwise: float  # kernels other than matrix products and attention
    repeated: float  # the part of `elementwise` that recomputed modules repeat in the backward pass
    gather: float  # one collective around tensor-parallel layers, of which a pass has two for each block
    exchange: float  # exchange over context-parallel ranks
    dispatch: float  # one exchange of tokens with experts, of which a pass has two
    launch: float  # the host's launches of kernels, which the device's work overlaps
    # Waits of the device for the host in a mixture of experts, which has to know the tokens of each expert.
    wait: float

    @property
    def compute(self) -> float:
        """Seconds of matrix products and attention."""
        return self.attention_linear + self.core_attention + self.mlp + self.experts + self.shared


def layer_seconds(inputs: PlanInputs, layout: Layout, micro: MicroBatch, kind: LayerKind) -> LayerSeconds:
    """Predicts the seconds of the forward pass over one layer."""
    c, e, options, with_experts = inputs.weights.config, inputs.efficiency, inputs.options, kind.experts
    parts = layer_elements(c, *kind)
    rows = micro.tokens / layout.cp
    speed = inputs.flops * TERA * (e.fp8 if options.fp8 else 1.0)
    # half_rows: with few rows a product takes as long as reading its weights, here as if it had more rows.
    per_element = 2 * (rows + e.half_rows) / (layout.tp * speed)
    kept = kept_on_ranks(inputs, layout, kind)
    unfused = 1.0 if options.fused else UNFUSED
    # Bytes that the kernels move are taken as a multiple of the bytes that are kept for the backward pass.
    an_element = e.elementwise * unfused * options.weight_bytes * rows / layout.tp / (inputs.memory_bandwidth * GIGA)
    gather, exchange = _gather(inputs, layout, rows), _exchange(inputs, layout, rows, kind.linear)
    # Linear attention has a state of constant size: its work grows with the tokens, and not with pairs of them.
    attention = state_flops(c) * micro.tokens if kind.linear else pair_flops(c) * micro.pairs
    return LayerSeconds(
        attention_linear=parts.attention * per_element,
        mla_up=parts.mla_up * per_element,
        core_attention=attention / (layout.tp * layout.cp * e.attention * inputs.flops * TERA),
        mlp=(parts.mlp + parts.router) * per_element,
        experts=_expert_seconds(inputs, layout, rows, speed) if with_experts else 0.0,
        shared=parts.shared * per_element,
        elementwise=kept.all * an_element,
        repeated=kept.recomputed(inputs.recompute) * an_element,
        gather=gather,
        exchange=exchange,
        # On the FSDP backend ranks of experts have all tokens, and sum their outputs as in a dense layer.
        dispatch=_dispatch(inputs, layout, rows / layout.tp) if with_experts and not options.fsdp else 0.0,
        launch=unfused * e.layer,
        wait=unfused * e.expert_layer if with_experts else 0.0,
    )


def _expert_seconds(inputs: PlanInputs, layout: Layout, rows: float, speed: float) -> float:
    """Predicts the seconds of routed experts on the fullest rank: a grouped matrix product with few rows for each."""
    c = inputs.weights.config
    assert c.experts is not None
    # Each expert is a separate matrix product, whose weights are read whatever the number of its tokens.
    on_rank = c.experts.count / layout.ep
    elements = 3 * c.hidden * c.experts.ffn / layout.etp
    copies = rows / layout.tp * c.experts.top_k * layout.etp * inputs.imbalance
    return 2 * elements * (copies + on_rank * inputs.efficiency.half_rows) / speed


def _gather(inputs: PlanInputs, layout: Layout, rows: float) -> float:
    """Predicts the seconds of gathering or scattering a micro-batch's hidden states over tensor-parallel ranks."""
    received = rows * inputs.weights.config.hidden * inputs.options.weight_bytes * (1 - 1 / layout.tp)
    return received / link_rate(inputs, layout.tp)


def _exchange(inputs: PlanInputs, layout: Layout, rows: float, linear: bool) -> float:
    """Predicts the seconds of exchanging tokens for heads and back around attention (Ulysses, arXiv:2309.14509)."""
    # Where keys and values are exchanged instead, a rank receives those that all other context-parallel ranks have.
    c = inputs.weights.config
    if linear and c.linear:
        width = c.linear.convolved_width + 2 * c.linear.value_width + 2 * c.linear.value_heads
        received = rows * width * (1 - 1 / layout.cp)
    elif inputs.options.exchanged == "heads":
        received = rows * 2 * (c.heads + c.kv_heads) * c.head_dim * (1 - 1 / layout.cp)
    else:
        received = rows * 2 * c.kv_heads * c.head_dim * (layout.cp - 1)
    return received / layout.tp * inputs.options.weight_bytes / link_rate(inputs, layout.tp * layout.cp)


def _dispatch(inputs: PlanInputs, layout: Layout, tokens: float) -> float:
    """Predicts the seconds of sending tokens to the ranks of their experts, or of receiving the results."""
    # A copy for each of top_k experts, or with a flex dispatcher one for each node and rank that has any of them;
    # from there to the other etp - 1 ranks that shard an expert.
    c, options = inputs.weights.config, inputs.options
    assert c.experts is not None
    # Of evenly distributed tokens 1 / nodes stay on the node, and 1 / ep on the rank.
    nodes = max(1, -(-layout.ep * layout.etp // inputs.node))
    near = far = float(c.experts.top_k)
    if options.flex_dispatch:
        near, far = (distinct(places, c.experts.top_k) for places in (layout.ep, nodes))
    outside = far * (1 - 1 / nodes)
    inside = near * (1 - 1 / layout.ep) if options.flex_dispatch else near * max(0.0, 1 / nodes - 1 / layout.ep)
    seconds = outside / (GIGA * inputs.inter_node) + inside / (GIGA * inputs.intra_node)
    seconds += near * (layout.etp - 1) / link_rate(inputs, layout.etp)
    return tokens * c.hidden * inputs.options.weight_bytes * seconds * inputs.imbalance


def distinct(places: int, choices: int) -> float:
    """Returns the expected number of different places of `places` that independent, even choices name."""
    # Eight choices of eight places name 5.25 of them.
    return places * (1 - (1 - 1 / places) ** choices)


def link_rate(inputs: PlanInputs, reach: int) -> float:
    """Returns the bytes per second between ranks of a group that spans `reach` consecutive ranks."""
    return GIGA * (inputs.intra_node if reach <= inputs.node else inputs.inter_node)


def forward_seconds(inputs: PlanInputs, part: LayerSeconds, blocks: int) -> float:
    """Returns the seconds of a forward pass over a layer with `blocks` tensor-parallel blocks."""
    # Blocks are attention and a dense feed-forward layer: a layer with experts has one.
    sends = _exposed_dispatch(inputs, part) + _exposed_gather(inputs, part, 2 * blocks)
    sends += _exposed_exchange(inputs, part, part.core_attention)
    # The host launches kernels while the device works: the slower of both counts.
    return max(part.compute + part.elementwise + sends, part.launch) + part.wait


def backward_seconds(inputs: PlanInputs, part: LayerSeconds, blocks: int) -> float:
    """Returns the seconds of a backward pass over a layer, without what is computed again."""
    linear = part.compute - part.core_attention
    attention = ATTENTION_BACKWARD * part.core_attention
    # Three collectives a block and not two: sequence parallelism gathers the input again for the weights' gradient.
    sends = _exposed_dispatch(inputs, part) + _exposed_gather(inputs, part, 3 * blocks)
    sends += _exposed_exchange(inputs, part, attention)
    compute = 2 * linear + attention
    return max(compute + 2 * part.elementwise + sends, 2 * part.launch) + part.wait


def repeated_seconds(inputs: PlanInputs, part: LayerSeconds, blocks: int) -> float:
    """Returns the seconds of computing discarded activations again in the backward pass."""
    if isinstance(inputs.recompute, bool):
        return forward_seconds(inputs, part, blocks) if inputs.recompute else 0.0
    # A recomputed mixture sends its tokens to the experts again.
    mixture = part.experts + part.shared + _exposed_dispatch(inputs, part)
    seconds = {
        "core_attn": part.core_attention,
        "mla_up_proj": part.mla_up,
        "mlp": part.mlp if not part.experts else 0.0,
        "moe": mixture + part.wait if part.experts else 0.0,
        "shared_experts": part.shared,
    }
    return part.repeated + sum(seconds.get(module, 0.0) for module in inputs.recompute)


def _exposed_dispatch(inputs: PlanInputs, part: LayerSeconds) -> float:
    """Returns the seconds of both exchanges with experts that nothing overlaps."""
    hidden = part.shared if inputs.options.shared_expert_overlap else 0.0
    if inputs.options.expert_overlap:
        hidden += part.compute - part.shared
    return max(0.0, 2 * part.dispatch - hidden)


def _exposed_exchange(inputs: PlanInputs, part: LayerSeconds, attention: float) -> float:
    """Returns the seconds of the exchange over context-parallel ranks that attention does not overlap."""
    return max(0.0, part.exchange - attention) if inputs.options.exchanged == "ring" else part.exchange


def _exposed_gather(inputs: PlanInputs, part: LayerSeconds, rounds: int) -> float:
    hidden = part.attention_linear + part.mlp if inputs.options.tensor_overlap else 0.0
    return max(0.0, rounds * part.gather - hidden)


@cache  # a search computes many plans of one layout
def stage_layers(c: HFConfig, layout: Layout) -> tuple[Mapping[LayerKind, int], ...]:
    """Counts the layers of each kind of every pipeline stage."""
    return tuple(
        Counter(LayerKind.of(c, layer) for layer in layout.stage(c.layers, stage).layers) for stage in range(layout.pp)
    )


def head_seconds(inputs: PlanInputs, layout: Layout, micro: MicroBatch) -> float:
    """Predicts the seconds of the output layer in a forward pass: its product, and passes over float32 logits."""
    c = inputs.weights.config
    if inputs.weights.head == "value":
        return 0.0  # one row
    rows, vocabulary = micro.tokens / layout.cp, c.vocab / layout.tp
    product = 2 * (rows + inputs.efficiency.half_rows) * c.hidden * vocabulary / (inputs.flops * TERA)
    return product + LOGIT_PASSES * LOGIT_BYTES * rows * vocabulary / (inputs.memory_bandwidth * GIGA)
