"""Bytes on the device of one rank, for each pipeline stage: all ranks of a stage have the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.planner.activations import kept_elements
from verl_mg.planner.inputs import WEIGHT_BYTES, PlanInputs
from verl_mg.planner.length_spread import packed
from verl_mg.planner.training_options import TrainingOptions
from verl_mg.reshard.encode import check_engine_blocks, encoded_maps
from verl_mg.reshard.encoding import Wire, encoding_of
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.weight_table import WeightTable

OPTIMIZER_STATES = "optimizer states"
"""Name of the part of a role's memory with main weights and moments."""
ACTIVATIONS = "activations"
"""Name of the part of a role's memory that exists only while it computes."""
FLOAT32_BYTES = 4
"""Bytes of a weight that is float32 in every runtime."""
FP8_COPY_BYTES = 2
"""Bytes of the two copies of a weight in FP8, one of them transposed, that Transformer Engine keeps between passes."""
LOGIT_CHUNK_BYTES = 2**30
"""Bytes of a chunk of float32 logits, at most."""
LOGIT_COPIES = 3
"""Tensors of a chunk's size at the same time: float32 logits, their exponentials and their gradient."""


@dataclass(frozen=True)
class Elements:
    """Number of elements of the parameters of one rank, padding included."""

    dense: int
    """Number of bf16 elements outside of experts."""
    experts: int
    """Number of bf16 elements of experts."""
    float32: int
    """Number of float32 elements (router biases), which have no gradient."""
    vocabulary: int = 0
    """Number of the dense elements that are of the embedding or the output layer."""

    @property
    def trained(self) -> int:
        """Number of elements with gradients."""
        return self.dense + self.experts

    def bytes(self, weight_bytes: int) -> int:
        """Returns the bytes of the weights of one rank; `weight_bytes`: of one weight that may be bf16."""
        return weight_bytes * self.trained + FLOAT32_BYTES * self.float32


def elements(weights: WeightTable, shard_map: ShardMap, rank: int) -> Elements:
    """Counts the elements of one rank's shards.

    Args:
        weights: weight table of the model.
        shard_map: shards of every rank.
        rank: the rank.
    """
    counts = {"dense": 0, "experts": 0, "float32": 0}
    outside = {weights.model.embedding.name, weights.model.output.name}
    vocabulary = 0
    for shard in shard_map.shards(rank).values():
        counts[_kind(weights, shard)] += math.prod(shard.shape)
        vocabulary += math.prod(shard.shape) if any(piece.tensor in outside for piece in shard.pieces) else 0
    return Elements(**counts, vocabulary=vocabulary)


def _kind(weights: WeightTable, shard: Shard) -> str:
    if not shard.pieces:
        return "dense"  # all padding, which only vocabularies have
    entry = weights.tensor_index.entries[shard.pieces[0].tensor]
    if entry.tensor.float32:
        return "float32"
    return "dense" if entry.expert is None else "experts"


@dataclass(frozen=True)
class TrainMemory:
    """Memory of a role on a rank of each pipeline stage."""

    elements: tuple[Elements, ...]
    """Elements of the parameters, one entry for each stage."""
    parts: Mapping[str, tuple[int, ...]]
    """Bytes of each part, one entry for each stage."""

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes of all parts together, one entry for each stage."""
        return tuple(sum(sizes) for sizes in zip(*self.parts.values(), strict=True))


def train_memory(inputs: PlanInputs, layout: Layout) -> TrainMemory:
    """Computes the memory of a trained role.

    Args:
        inputs: inputs of the plan for the role.
        layout: layout on all ranks of the role.
    """
    counted = _on_stages(inputs.weights, layout.fit(len(inputs.placement_ranks)))
    parts = {
        "weights": tuple(e.bytes(inputs.options.weight_bytes) for e in counted),
        **({"FP8 weights": tuple(FP8_COPY_BYTES * e.trained for e in counted)} if inputs.options.fp8 else {}),
        "gradients": tuple(inputs.options.gradient_bytes * e.trained for e in counted),
        OPTIMIZER_STATES: tuple(_optimizer_bytes(inputs.options, e, layout) for e in counted),
        ACTIVATIONS: tuple(activation_bytes(inputs, layout, stage) for stage in range(layout.pp)),
    }
    return TrainMemory(counted, parts)


def frozen_memory(inputs: PlanInputs, layout: Layout) -> TrainMemory:
    """Computes the memory of a role that only runs inference.

    Args:
        inputs: inputs of the plan for the role.
        layout: layout on all ranks of the role.
    """
    counted = _on_stages(inputs.weights, layout.fit(len(inputs.placement_ranks)))
    activations = tuple(inference_bytes(inputs, layout, stage) for stage in range(layout.pp))
    return TrainMemory(
        counted, {"weights": tuple(e.bytes(inputs.options.weight_bytes) for e in counted), ACTIVATIONS: activations}
    )


@cache  # equal for every batch, and for every role of the same model
def _on_stages(weights: WeightTable, layout: Layout) -> tuple[Elements, ...]:
    shard_map = weights.shard_map_megatron(Placement.on(layout, layout.ranks))
    return tuple(elements(weights, shard_map, layout.rank_of(pp=stage)) for stage in range(layout.pp))


@cache
def _on_engine_stages(weights: WeightTable, layout: EngineLayout) -> tuple[Elements, ...]:
    shard_map = weights.shard_map_engine(EnginePlacement(layout, tuple(range(layout.ranks))))
    return tuple(elements(weights, shard_map, stage * layout.tp) for stage in range(layout.pp))


@dataclass(frozen=True)
class EngineBytes:
    """Bytes of the weights of an engine on one rank, scales included."""

    dense: float
    """Bytes outside of experts, that each decoding step reads."""
    experts: float
    """Bytes of experts."""


@cache
def _quantized_stages(weights: WeightTable, layout: EngineLayout, wire: Wire) -> tuple[EngineBytes, ...]:
    """Counts the bytes of quantized weights as the sync sends them, on the first rank of each stage."""
    encoding = encoding_of(wire)
    assert encoding
    whole = weights.shard_map_engine(EnginePlacement(layout, tuple(range(layout.ranks))))
    check_engine_blocks(weights, whole, encoding, [stage * layout.tp for stage in range(layout.pp)])
    target = encoded_maps(weights, whole, whole, encoding).target
    stages = []
    for stage in range(layout.pp):
        sizes = {"dense": 0, "experts": 0}
        for shard in target.shards(stage * layout.tp).values():
            name = shard.pieces[0].tensor if shard.pieces else ""
            entry = weights.tensor_index.entries.get(target.plain_name(name))
            dtype = target.tensors[name].wire_dtype(torch.bfloat16) if name else torch.bfloat16
            kind = "experts" if entry and entry.expert is not None else "dense"
            sizes[kind] += math.prod(shard.shape) * dtype.itemsize
        stages.append(EngineBytes(**sizes))
    return tuple(stages)


def check_engine(inputs: PlanInputs, layout: EngineLayout) -> None:
    """Checks a layout of engines, which may have quantized weights.

    Args:
        inputs: inputs of the plan.
        layout: layout of an engine.

    Raises:
        UserError: the model does not admit it, or it cuts blocks of quantized weights.
    """
    inputs.weights.check_engine_layout(layout)
    if inputs.wire != "cast":
        _quantized_stages(inputs.weights, layout, inputs.wire)


def _optimizer_bytes(options: TrainingOptions, e: Elements, layout: Layout) -> int:
    dense, experts = -(-e.dense // (layout.dp * layout.cp)), -(-e.experts // layout.edp)
    states = options.state_bytes * (dense + experts) if options.sharded_states else options.state_bytes * e.trained
    states += options.vocabulary_bytes * -(-e.vocabulary // (layout.dp * layout.cp if options.sharded_states else 1))
    return round((1 - options.offloaded_states) * states)


@dataclass(frozen=True)
class RolloutMemory:
    """Memory of an engine's weights and KV cache on a rank of each pipeline stage."""

    layout: EngineLayout
    """Layout of the engine."""
    elements: tuple[Elements, ...]
    """Elements of the weights, one entry for each stage."""
    limit: float
    """Bytes available on a rank for weights and cache together."""
    per_token: tuple[int, ...]
    """Bytes of a token in the cache of a rank, one entry for each stage."""
    stages: tuple[EngineBytes, ...]
    """Bytes of the weights on a rank, one entry for each stage."""

    @property
    def cache_bytes(self) -> tuple[float, ...]:
        """Bytes available for the cache; negative where the weights alone are too large."""
        return tuple(self.limit - size for size in self.weights)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Bytes of the weights on a rank, one entry for each stage."""
        return tuple(round(stage.dense + stage.experts) for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Capacity of the KV cache of one attention group of an engine, in tokens."""
        return max(0, min(int(size // each) for size, each in zip(self.cache_bytes, self.per_token, strict=True)))

    @property
    def tokens_per_engine(self) -> int:
        """Capacity of an engine in tokens: with data-parallel attention each of its groups has a cache."""
        return self.tokens * self.layout.adp


def rollout_memory(inputs: PlanInputs, layout: EngineLayout, limit: float | None = None) -> RolloutMemory:
    """Computes the memory of an engine.

    Args:
        inputs: inputs of the plan.
        layout: layout of the engine.
        limit: bytes available on a rank; None for all usable bytes of a device.
    """
    counted = _on_engine_stages(inputs.weights, layout)
    per_token = tuple(kv_bytes(inputs.weights, layout, stage) for stage in range(layout.pp))
    if inputs.wire == "cast":
        item = inputs.rollout_bytes
        stages = tuple(EngineBytes(item * e.dense + FLOAT32_BYTES * e.float32, item * e.experts) for e in counted)
    else:
        stages = _quantized_stages(inputs.weights, layout, inputs.wire)
    return RolloutMemory(layout, counted, inputs.usable if limit is None else limit, per_token, stages)


def kv_bytes(weights: WeightTable, layout: EngineLayout, stage: int) -> int:
    """Computes the bytes of one token in the KV cache of a rank.

    Grouped attention: keys and values of the rank's heads, at least one, which neighbouring ranks may share. Latent
    attention: the compressed state and the rotary key (DeepSeek-V2, arXiv:2405.04434, section 2.1), on every rank.
    Linear attention: nothing, its state has the same size for a sample of any length.

    Args:
        weights: weight table of the model.
        layout: layout of the engine.
        stage: pipeline stage of the rank.
    """
    c = weights.config
    width = (
        c.latent.kv_rank + c.latent.rope_dim if c.latent else 2 * c.head_dim * max(1, c.kv_heads // layout.attention_tp)
    )
    with_cache = sum(not c.has_linear_attention(layer) for layer in layout.layers(c.layers, stage))
    return WEIGHT_BYTES * width * max(1, with_cache)  # 0 would be a cache of any size


def micro_batches(inputs: PlanInputs, layout: Layout) -> int:
    """Returns the number of micro-batches of a rank in an optimizer step.

    Args:
        inputs: inputs of the plan for the role.
        layout: layout of the role.
    """
    samples = inputs.tokens_per_iteration / inputs.lengths.mean / (inputs.minibatches * layout.dp)
    return max(1, math.ceil(samples * packed(inputs.lengths, inputs.micro_batch).per_sample - 1e-9))


def chunks_in_flight(layout: Layout, stage: int, micros: int) -> int:
    """Returns the number of model chunks of a stage that have activations at once, each of one micro-batch.

    One-forward-one-backward: min(pp - stage, micro-batches). Interleaved with vpp chunks, stage 0 has
    pp * vpp + pp - 1, which is Korthikanti's factor 1 + (pp - 1) / (pp * vpp) over pp micro-batches.

    Args:
        layout: layout of the role.
        stage: pipeline stage.
        micros: number of micro-batches.
    """
    if layout.vpp == 1:
        return min(layout.pp - stage, micros)
    return min(2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1, micros * layout.vpp)


def activation_bytes(inputs: PlanInputs, layout: Layout, stage: int) -> int:
    """Computes the peak bytes of activations in training: layers in flight, one being recomputed, the output layer.

    Args:
        inputs: inputs of the plan for the role.
        layout: layout of the role.
        stage: pipeline stage.
    """
    c = inputs.weights.config
    layers = [layer for chunk in range(layout.vpp) for layer in layout.layers(c.layers, stage, chunk)]
    every = [kept_elements(c, c.has_experts(layer), layout.etp, c.has_linear_attention(layer)) for layer in layers]
    options = inputs.options
    kept = sum(layer.on_device(inputs.recompute, options.offload_modules, options.fp8) for layer in every)
    recomputed = max(layer.recomputed(inputs.recompute) for layer in every)
    in_flight = chunks_in_flight(layout, stage, micro_batches(inputs, layout)) / layout.vpp
    tokens = inputs.longest_micro_batch / layout.cp
    in_layers = options.weight_bytes * tokens / layout.tp * (in_flight * kept + recomputed)
    return round(in_layers + (_output_bytes(inputs, layout, tokens) if stage == layout.pp - 1 else 0))


def inference_bytes(inputs: PlanInputs, layout: Layout, stage: int) -> int:
    """Computes the peak bytes of activations in inference: one layer at a time, and a chunk of logits.

    Args:
        inputs: inputs of the plan for the role.
        layout: layout of the role.
        stage: pipeline stage.
    """
    c = inputs.weights.config
    layers = [layer for chunk in range(layout.vpp) for layer in layout.layers(c.layers, stage, chunk)]
    every = [kept_elements(c, c.has_experts(layer), layout.etp, c.has_linear_attention(layer)) for layer in layers]
    widest = max(layer.all for layer in every)
    tokens = inputs.longest_micro_batch / layout.cp
    item = inputs.options.weight_bytes
    output = item * tokens * c.hidden + _logit_bytes(inputs, layout, tokens) if stage == layout.pp - 1 else 0
    return round(item * tokens / layout.tp * widest + output)


def _output_bytes(inputs: PlanInputs, layout: Layout, tokens: float) -> float:
    """Computes bytes of the output layer.

    Hidden states of all tokens and their gradient; of a language model also the projection's float32 gradient and
    chunks of logits.
    """
    hidden = inputs.weights.config.hidden
    states = 2 * inputs.options.weight_bytes * tokens * hidden
    if inputs.weights.head == "value":
        return states
    rows = inputs.weights.padded_vocab(layout.tp) / layout.tp
    return states + 4 * rows * hidden + _logit_bytes(inputs, layout, tokens)


def _logit_bytes(inputs: PlanInputs, layout: Layout, tokens: float) -> float:
    """Computes bytes of the logits of a chunk of tokens and of what is computed from them."""
    if inputs.weights.head == "value":
        return 0.0
    rows = inputs.weights.padded_vocab(layout.tp) / layout.tp
    return LOGIT_COPIES * min(LOGIT_CHUNK_BYTES, 4.0 * rows * tokens)
