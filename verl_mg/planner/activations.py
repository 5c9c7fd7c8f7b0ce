"""Activations of a layer: which part keeps how many elements of a token for the backward pass.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), count 34 s b h
bytes per layer outside the attention matrix, divided by tp under sequence parallelism. Here the same is counted for
gated feed-forward layers, grouped, latent and linear attention, and experts; without dropout there are no masks, and
flash attention keeps one float32 normalizer per head in place of the matrix.

    hidden 8, 2 heads of 4, 1 key-value head, feed-forward 16, one token in elements of bf16:

    norms: inputs 8 + 8, outputs 8 + 8    heads: q 8, k 4, v 4    output of attention 8    normalizer 2 x 2
    gate and up 2 x 16, their product 16
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from verl_mg.layout import Layout
from verl_mg.models.attention_config import LinearConfig
from verl_mg.models.hf_config import HFConfig
from verl_mg.planner.inputs import PlanInputs, packed
from verl_mg.planner.training_options import Recompute
from verl_mg.sharding.weight_table import WeightTable

CHUNK = 64  # tokens of a chunk in the kernels of linear attention
FLOAT32_ELEMENTS = 2  # number of bf16 elements with the bytes of one float32 element
DISCARDED: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("normalizer",),  # its output is the input of the projection, which keeps it
    "layernorm": ("attention_norm_output", "norm_outputs"),
    "mla_up_proj": ("heads",),
    "mlp": ("mlp_hidden", "mlp_product"),
    "moe": ("router", "dispatched", "expert_hidden", "expert_product", "shared_hidden", "shared_product"),
    "moe_act": ("expert_product",),
    "shared_experts": ("shared_hidden", "shared_product"),
}
"""Parts that a recomputed module does not keep, by megatron-core's names of modules."""
INPUTS: Mapping[str, str] = {
    "attn_norm": "layer_input",
    "qkv_linear": "attention_norm_output",
    "core_attn": "heads",
    "attn_proj": "attention_output",
    "mlp_norm": "norm_inputs",
    "expert_fc1": "dispatched",
    "moe_act": "expert_hidden",
}
"""Parts that are the input of an offloaded module, by megatron-core's names of modules."""
TOKENS = ("layer_input", "norm_inputs", "attention_norm_output", "norm_outputs", "compressed", "router")
"""Parts that tensor-parallel ranks divide by tokens, and only with sequence parallelism."""
LINEAR_INPUTS = (
    *("attention_norm_output", "norm_outputs", "attention_output", "dispatched"),
    *("mlp_product", "expert_product", "shared_product"),
)
"""Parts that are inputs of linear layers, which Transformer Engine keeps in FP8 where it multiplies in FP8."""
LOGIT_CHUNK_BYTES = 2**30  # bytes of a chunk of float32 logits, at most


class LayerKind(NamedTuple):
    """Kind of a layer, by which its seconds and its activations differ."""

    experts: bool
    linear: bool

    @classmethod
    def of(cls, c: HFConfig, layer: int) -> LayerKind:
        """Returns the kind of a layer of a model."""
        return cls(c.has_experts(layer), c.has_linear_attention(layer))


@dataclass(frozen=True)
class KeptElements:
    """Number of bf16 elements that one token keeps in one layer, over all ranks of a tensor-parallel group."""

    parts: Mapping[str, int]  # by part; a part that the layer does not have is missing

    @property
    def all(self) -> int:
        """Number of elements of all parts."""
        return sum(self.parts.values())

    def recomputed(self, modules: Recompute) -> int:
        """Returns the number of elements that are not kept but computed again."""
        return sum(self.parts.get(part, 0) for part in self._discarded(modules))

    def on_device(self, modules: Recompute, offloaded: tuple[str, ...], fp8: bool) -> float:
        """Returns the number of elements that wait on the device for the backward pass, FP8 inputs counted as half."""
        elsewhere = self._discarded(modules) | {INPUTS[module] for module in offloaded}
        halves = LINEAR_INPUTS if fp8 else ()
        return sum(size / (1 + (part in halves)) for part, size in self.parts.items() if part not in elsewhere)

    def _discarded(self, modules: Recompute) -> set[str]:
        if isinstance(modules, bool):
            return self.parts.keys() - {"layer_input"} if modules else set()
        return {part for module in modules for part in DISCARDED[module]}


def kept_elements(c: HFConfig, with_experts: bool, etp: int, linear: bool = False) -> KeptElements:
    """Counts the elements that one token keeps in one layer, over all ranks of a tensor-parallel group."""
    other_norms = c.hidden * (1 + c.sandwich_norms)
    parts = {
        "layer_input": c.hidden,  # input of the layer, which its first norm keeps
        "norm_inputs": other_norms,  # inputs of the other norms: the residual stream before the feed-forward layer
        "attention_norm_output": c.hidden,  # output of the norm before attention, which the next projection keeps
        "norm_outputs": other_norms,  # outputs of the other norms
    }
    parts |= _linear_attention(c.linear) if linear and c.linear else _attention(c)
    e = c.experts if with_experts else None
    if e is None:  # gate and up, and their product, the input of the down projection
        return KeptElements(parts | {"mlp_hidden": 2 * c.ffn, "mlp_product": c.ffn})
    return KeptElements(
        parts
        | {
            "router": FLOAT32_ELEMENTS * e.count,  # scores of experts
            # Copies of the token at its experts, whole on each of the etp ranks that shard one of them.
            "dispatched": e.top_k * etp * c.hidden,
            "expert_hidden": 2 * e.top_k * e.ffn,  # gate and up of the token's experts
            "expert_product": e.top_k * e.ffn,  # product of both, the input of the experts' down projection
            "shared_hidden": 2 * e.shared_ffn,  # shared experts: gate and up
            "shared_product": e.shared_ffn,  # product of both, the input of their down projection
        }
    )


def _linear_attention(c: LinearConfig) -> dict[str, int]:
    # Queries and keys are repeated for each value head.
    heads = 2 * c.convolved_width + 2 * c.value_heads * c.key_dim + c.value_width
    numbers = 2 * FLOAT32_ELEMENTS * c.value_heads  # decays and strengths
    # In place of normalizers it keeps these numbers and the solved system of equations of a chunk.
    normalizer = numbers + c.value_heads * CHUNK
    return {"heads": heads, "attention_output": 2 * c.value_width, "normalizer": normalizer}


def _attention(c: HFConfig) -> dict[str, int]:
    # `heads` are queries, keys and values, before and after their norms, and output gates; `attention_output` is the
    # input of the projection; `normalizer` is what the kernel of flash attention keeps.
    normalizer = FLOAT32_ELEMENTS * c.heads
    if c.latent is None:
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        gates = 2 * q if c.output_gate else 0  # gates, and the output before them
        heads = q + 2 * kv + (q + kv if c.qk_norm else 0) + gates
        return {"heads": heads, "attention_output": q, "normalizer": normalizer}
    latent, values = c.latent, c.heads * c.latent.v_dim
    return {
        "compressed": 2 * latent.q_rank + 2 * latent.kv_rank + latent.rope_dim,  # before and after their norms
        "heads": 2 * c.heads * (latent.qk_nope_head_dim + latent.rope_dim) + values,
        "attention_output": values,
        "normalizer": normalizer,
    }


def micro_batches(inputs: PlanInputs, layout: Layout) -> int:
    """Returns the number of micro-batches of a rank in an optimizer step."""
    samples = inputs.tokens_per_iteration / inputs.lengths.mean / (inputs.minibatches * layout.dp)
    # Less than a rounding error of the products before is not another micro-batch.
    return max(1, math.ceil(samples * packed(inputs.lengths, inputs.micro_batch).per_sample - 1e-9))


def chunks_in_flight(layout: Layout, stage: int, micros: int) -> int:
    """Returns the number of model chunks of a stage that have activations at the same time, each of one micro-batch."""
    # One-forward-one-backward: min(pp - stage, micro-batches). Interleaved with vpp chunks, stage 0 has
    # pp * vpp + pp - 1, which is Korthikanti's factor 1 + (pp - 1) / (pp * vpp) over pp micro-batches.
    if layout.vpp == 1:
        return min(layout.pp - stage, micros)
    return min(2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1, micros * layout.vpp)


def activation_bytes(inputs: PlanInputs, layout: Layout, stage: int) -> int:
    """Computes the peak bytes of activations in training: layers in flight, one being recomputed, the output layer."""
    every, options = _kept_by_layers(inputs, layout, stage), inputs.options
    kept = sum(layer.on_device(inputs.recompute, options.offload_modules, options.fp8) for layer in every)
    recomputed = max(layer.recomputed(inputs.recompute) for layer in every)
    # Chunks in flight are of 1 / vpp of the stage's layers.
    in_flight = chunks_in_flight(layout, stage, micro_batches(inputs, layout)) / layout.vpp
    tokens = inputs.longest_micro_batch / layout.cp
    in_layers = options.weight_bytes * tokens / layout.tp * (in_flight * kept + recomputed)
    return round(in_layers + (_output_bytes(inputs, layout, tokens) if stage == layout.pp - 1 else 0))


def inference_bytes(inputs: PlanInputs, layout: Layout, stage: int) -> int:
    """Computes the peak bytes of activations in inference: one layer at a time, and a chunk of logits."""
    widest = max(layer.all for layer in _kept_by_layers(inputs, layout, stage))
    tokens = inputs.longest_micro_batch / layout.cp
    item, hidden = inputs.options.weight_bytes, inputs.weights.config.hidden
    output = item * tokens * hidden + 4 * _logits(inputs, layout, tokens) if stage == layout.pp - 1 else 0
    return round(item * tokens / layout.tp * widest + output)


def _kept_by_layers(inputs: PlanInputs, layout: Layout, stage: int) -> list[KeptElements]:
    """Counts the elements that one token keeps in each layer of a stage, of all its chunks."""
    c = inputs.weights.config
    layers = [layer for chunk in range(layout.vpp) for layer in layout.layers(c.layers, stage, chunk)]
    return [kept_on_ranks(inputs, layout, LayerKind.of(c, layer)) for layer in layers]


def _output_bytes(inputs: PlanInputs, layout: Layout, tokens: float) -> float:
    # Hidden states of all tokens and their gradient; of a language model also the projection's float32 gradient and
    # a chunk of float32 logits and its gradient: the kernels of `vocabulary_kernels` write nothing else of that size.
    hidden, item = inputs.weights.config.hidden, inputs.options.weight_bytes
    states = 2 * item * tokens * hidden
    if inputs.weights.head == "value":
        return states
    return states + 4 * _vocabulary_rows(inputs, layout) * hidden + (4 + item) * _logits(inputs, layout, tokens)


def _logits(inputs: PlanInputs, layout: Layout, tokens: float) -> float:
    """Counts the logits of a chunk of tokens."""
    if inputs.weights.head == "value":
        return 0.0
    return min(LOGIT_CHUNK_BYTES / 4, _vocabulary_rows(inputs, layout) * tokens)


def _vocabulary_rows(inputs: PlanInputs, layout: Layout) -> float:
    weights, tp = inputs.weights, layout.tp
    if isinstance(weights, WeightTable) and not inputs.options.fsdp:
        return weights.padded_vocab(tp) / tp
    return -(-weights.config.vocab // tp)


def kept_on_ranks(inputs: PlanInputs, layout: Layout, kind: LayerKind) -> KeptElements:
    """Counts the same as `kept_elements` for a layer of a plan."""
    kept = kept_elements(inputs.weights.config, kind.experts, layout.etp, kind.linear)
    if not inputs.options.fsdp:
        return kept
    # Without sequence parallelism each of the tp ranks has whole tokens outside of heads and experts.
    return KeptElements({part: size * (layout.tp if part in TOKENS else 1) for part, size in kept.parts.items()})
