"""Bytes of activations on a rank: of layers that wait for the backward pass, and of the output layer.

pp4, 8 micro-batches: 4, 3, 2, 1 chunks in flight on stages 0 to 3; with vpp2: 11, 9, 7, 5 chunks of half the layers
"""

from __future__ import annotations

import math

from verl_mg.layout import Layout
from verl_mg.planner.activations import KeptElements, LayerKind, kept_elements
from verl_mg.planner.inputs import PlanInputs
from verl_mg.planner.length_spread import packed
from verl_mg.sharding.weight_table import WeightTable

LOGIT_CHUNK_BYTES = 2**30  # bytes of a chunk of float32 logits, at most
LOGIT_COPIES = 3  # tensors of a chunk's size at the same time: float32 logits, their exponentials and their gradient


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
    output = item * tokens * hidden + _logit_bytes(inputs, layout, tokens) if stage == layout.pp - 1 else 0
    return round(item * tokens / layout.tp * widest + output)


def _kept_by_layers(inputs: PlanInputs, layout: Layout, stage: int) -> list[KeptElements]:
    """Counts the elements that one token keeps in each layer of a stage, of all its chunks."""
    c = inputs.weights.config
    layers = [layer for chunk in range(layout.vpp) for layer in layout.layers(c.layers, stage, chunk)]
    return [kept_on_ranks(inputs, layout, LayerKind.of(c, layer)) for layer in layers]


def _output_bytes(inputs: PlanInputs, layout: Layout, tokens: float) -> float:
    """Computes bytes of the output layer."""
    # Hidden states of all tokens and their gradient; of a language model also the projection's float32 gradient and
    # chunks of logits.
    hidden = inputs.weights.config.hidden
    states = 2 * inputs.options.weight_bytes * tokens * hidden
    if inputs.weights.head == "value":
        return states
    rows = _vocabulary_rows(inputs, layout)
    return states + 4 * rows * hidden + _logit_bytes(inputs, layout, tokens)


def _logit_bytes(inputs: PlanInputs, layout: Layout, tokens: float) -> float:
    """Computes bytes of the logits of a chunk of tokens and of what is computed from them."""
    if inputs.weights.head == "value":
        return 0.0
    rows = _vocabulary_rows(inputs, layout)
    return LOGIT_COPIES * min(LOGIT_CHUNK_BYTES, 4.0 * rows * tokens)


def _vocabulary_rows(inputs: PlanInputs, layout: Layout) -> float:
    weights, tp = inputs.weights, layout.tp
    if isinstance(weights, WeightTable) and not inputs.options.fsdp:
        return weights.padded_vocab(tp) / tp
    return -(-weights.config.vocab // tp)


def kept_on_ranks(inputs: PlanInputs, layout: Layout, kind: LayerKind) -> KeptElements:
    """Counts the elements that one token keeps in one layer, over all ranks of a tensor-parallel group."""
    kept = kept_elements(inputs.weights.config, kind.experts, layout.etp, kind.linear)
    return kept.without_sequence_parallelism(layout.tp) if inputs.options.fsdp else kept
