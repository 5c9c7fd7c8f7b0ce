"""What a rank keeps between forward and backward pass.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), count
34 s b h bytes a layer outside the attention matrix, all of it divided by tp under sequence parallelism. Here the same
is counted for gated feed-forward layers, grouped and latent attention, and experts; without dropout there are no
masks, and flash attention keeps a float32 normaliser a head in place of the matrix.
"""

from __future__ import annotations

from verl_mg.layout import Layout
from verl_mg.models.hf_config import HFConfig
from verl_mg.planner.inputs import WEIGHT_BYTES, PlanInputs

FLOAT32 = 2  # float32 numbers count as this many bf16 ones
LOGIT_CHUNKS = 3 * 64 * 2**20
"""Bytes: a chunk of float32 logits, its exponentials and its gradient."""


def kept_elements(c: HFConfig, with_experts: bool, etp: int) -> int:
    """Elements (bf16) that one token leaves in one layer, over all ranks of a tensor-parallel group."""
    norms = (
        2 * c.hidden * (2 + c.sandwich_norms)
    )  # input and output; the output is what the linear layer behind it keeps
    return norms + _attention(c) + (_experts(c, etp) if with_experts else 3 * c.ffn)


def _attention(c: HFConfig) -> int:
    normaliser = FLOAT32 * c.heads
    if c.latent is None:
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        before_norm = q + kv if c.qk_norm else 0
        return q + 2 * kv + before_norm + q + normaliser
    latent = c.latent
    low_rank = 2 * latent.q_rank + 2 * latent.kv_rank + latent.rope_dim  # before and after their norms
    q_and_k = 2 * c.heads * (latent.qk_nope_head_dim + latent.rope_dim)
    v_and_output = 2 * c.heads * latent.v_dim
    return low_rank + q_and_k + v_and_output + normaliser


def _experts(c: HFConfig, etp: int) -> int:
    """A token goes to top_k experts; its copy stands whole on each of the etp ranks that cut an expert."""
    assert c.experts is not None
    e = c.experts
    return FLOAT32 * e.count + e.top_k * (etp * c.hidden + 3 * e.ffn) + 3 * e.shared_ffn


def micro_batches(setting: PlanInputs, layout: Layout) -> int:
    """How many micro-batches a rank runs in an optimizer step."""
    return max(1, -(-setting.batch // (setting.minibatches * layout.dp * setting.longest_micro_batch)))


def chunks_in_flight(layout: Layout, stage: int, micros: int) -> int:
    """Model chunks of a stage with activations at once, each of one micro-batch.

    One-forward-one-backward: min(pp - stage, micro-batches). Interleaved with vpp chunks, stage 0 has
    pp * vpp + pp - 1, which is Korthikanti's factor 1 + (pp - 1) / (pp * vpp) over pp micro-batches.
    """
    if layout.vpp == 1:
        return min(layout.pp - stage, micros)
    return min(2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1, micros * layout.vpp)


def activation_bytes(setting: PlanInputs, layout: Layout, stage: int) -> int:
    """Bytes on a rank of a stage at the worst moment: layers in flight, one being recomputed, the output layer."""
    c = setting.weights.config
    layers = [layer for chunk in range(layout.vpp) for layer in layout.layers(c.layers, stage, chunk)]
    whole = [kept_elements(c, c.has_experts(layer), layout.etp) for layer in layers]
    kept, working = ([c.hidden] * len(layers), max(whole)) if setting.recompute else (whole, 0)
    flying = chunks_in_flight(layout, stage, micro_batches(setting, layout)) / layout.vpp
    tokens = setting.longest_micro_batch / layout.cp
    in_layers = WEIGHT_BYTES * tokens / layout.tp * (flying * sum(kept) + working)
    return round(in_layers + (_output_bytes(setting, layout, tokens) if stage == layout.pp - 1 else 0))


def inference_bytes(setting: PlanInputs, layout: Layout, stage: int) -> int:
    """Bytes on a rank of a stage that only judges: one layer's at a time, and a chunk of logits."""
    c = setting.weights.config
    layers = [layer for chunk in range(layout.vpp) for layer in layout.layers(c.layers, stage, chunk)]
    widest = max(kept_elements(c, c.has_experts(layer), layout.etp) for layer in layers)
    tokens = setting.longest_micro_batch / layout.cp
    output = WEIGHT_BYTES * tokens * c.hidden + LOGIT_CHUNKS if stage == layout.pp - 1 else 0
    return round(WEIGHT_BYTES * tokens / layout.tp * widest + output)


def _output_bytes(setting: PlanInputs, layout: Layout, tokens: float) -> float:
    """Hidden states of all tokens and their gradient; of a language model, also the projection's float32 gradient and
    chunks of logits."""
    hidden = setting.weights.config.hidden
    states = 2 * WEIGHT_BYTES * tokens * hidden
    if setting.weights.head == "value":
        return states
    rows = setting.weights.padded_vocab(layout.tp) / layout.tp
    return states + 4 * rows * hidden + LOGIT_CHUNKS
