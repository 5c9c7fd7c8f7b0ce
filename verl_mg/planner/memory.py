"""Bytes on the device of one rank, for each pipeline stage: all ranks of a stage have the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from verl_mg.config import FsdpConfig
from verl_mg.dtypes import ITEM_BYTES
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.layout.suggest import resolve_layout
from verl_mg.lazy_import import lazy_import
from verl_mg.planner.activations import activation_bytes, inference_bytes
from verl_mg.planner.inputs import ACTIVATIONS, GATHERED, OPTIMIZER_STATES, WEIGHT_BYTES, PlanInputs
from verl_mg.planner.training_options import TrainingOptions
from verl_mg.reshard.encode import check_engine_blocks, encoded_maps
from verl_mg.reshard.encoding import Wire, encoding_of
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.module_table import ModuleTable
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.weight_table import WeightTable

if TYPE_CHECKING:
    from verl_mg.fsdp import family_check
    from verl_mg.fsdp import sharded_module as fsdp_module
    from verl_mg.fsdp.family_check import Form
    from verl_mg.fsdp.sharded_module import ShardedModule
else:
    family_check = lazy_import("verl_mg.fsdp.family_check")
    fsdp_module = lazy_import("verl_mg.fsdp.sharded_module")

BF16_BYTES = 2
FLOAT32_BYTES = 4  # bytes of a float32 weight, and of each gradient that is summed
FP8_COPY_BYTES = 2
"""Bytes of the two copies of a weight in FP8, one of them transposed, that Transformer Engine keeps between passes."""
LAYERS_IN_FLIGHT = 2  # layers that are gathered at the same time: one computes, the next one arrives


@dataclass(frozen=True)
class Elements:
    """Number of elements of the parameters of one rank, padding included."""

    dense: int  # number of bf16 elements outside of experts
    experts: int  # number of bf16 elements of experts
    other_bytes: int  # bytes of parameters with their own dtype (router biases, tables), which have no gradient
    vocabulary: int = 0  # number of the dense elements that are of the embedding or the output layer

    @property
    def trained(self) -> int:
        """Number of elements with gradients."""
        return self.dense + self.experts

    def bytes(self, weight_bytes: int) -> int:
        """Returns the bytes of the weights of one rank; `weight_bytes`: of one weight that may be bf16."""
        return weight_bytes * self.trained + self.other_bytes


def elements(weights: ModelTable, shard_map: ShardMap, rank: int) -> Elements:
    """Counts the elements of one rank's shards."""
    # Shards of the table that a job uses: so padding, copies of tied embeddings and replicated heads are counted.
    counts = {"dense": 0, "experts": 0, "other_bytes": 0}
    entries = weights.tensor_index.entries
    outside = {name for name, entry in entries.items() if entry.layer is None and len(entry.tensor.shape) == 2}
    vocabulary = 0
    for shard in shard_map.shards(rank).values():
        kind, itemsize = _kind(weights, shard)
        counts[kind] += itemsize * math.prod(shard.shape)
        vocabulary += math.prod(shard.shape) if any(piece.tensor in outside for piece in shard.pieces) else 0
    return Elements(**counts, vocabulary=vocabulary)


def _kind(weights: ModelTable, shard: Shard) -> tuple[str, int]:
    """Returns the field of `Elements` in which a shard is counted, and the count of an element."""
    if not shard.pieces:
        return "dense", 1  # all padding, which only vocabularies have
    entry = weights.tensor_index.entries[shard.pieces[0].tensor]
    if entry.tensor.dtype:
        return "other_bytes", ITEM_BYTES[entry.tensor.dtype]
    return ("experts" if entry.of_experts else "dense"), 1


@dataclass(frozen=True)
class TrainMemory:
    """Memory of a role on a rank of each pipeline stage."""

    elements: tuple[Elements, ...]  # elements of the parameters, one entry for each stage
    parts: Mapping[str, tuple[int, ...]]  # bytes of each part, one entry for each stage

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes of all parts together, one entry for each stage."""
        return tuple(sum(sizes) for sizes in zip(*self.parts.values(), strict=True))


def train_memory(inputs: PlanInputs, layout: Layout, is_trained: bool = True) -> TrainMemory:
    """Computes the memory of a role on all its ranks; one that is not trained only runs inference."""
    layout, options = layout.fit(len(inputs.placement_ranks)), inputs.options
    if options.fsdp:  # the same on all ranks
        module, sizes = sharded_module(inputs, layout), _module_parts(inputs, layout, is_trained)
        return TrainMemory((Elements(module.sharded, 0, 0),), {name: (size,) for name, size in sizes.items()})
    counted = _on_stages(inputs.weights, layout)
    parts = {"weights": tuple(e.bytes(options.weight_bytes) for e in counted)}
    if is_trained and options.fp8:
        parts["FP8 weights"] = tuple(FP8_COPY_BYTES * e.trained for e in counted)
    if is_trained:
        parts["gradients"] = tuple(options.gradient_bytes * e.trained for e in counted)
        parts[OPTIMIZER_STATES] = tuple(_optimizer_bytes(options, e, layout) for e in counted)
    activations = activation_bytes if is_trained else inference_bytes
    parts[ACTIVATIONS] = tuple(activations(inputs, layout, stage) for stage in range(layout.pp))
    return TrainMemory(counted, parts)


@cache  # equal for every batch, and for every role of the same model
def _on_stages(weights: ModelTable, layout: Layout) -> tuple[Elements, ...]:
    assert isinstance(weights, WeightTable)
    shard_map = weights.shard_map_megatron(Placement.on(layout, layout.ranks))
    return tuple(elements(weights, shard_map, layout.rank_of(pp=stage)) for stage in range(layout.pp))


@cache  # a search pairs each layout of engines with many layouts of training
def _on_engine_stages(weights: ModelTable, layout: EngineLayout) -> tuple[Elements, ...]:
    shard_map = weights.shard_map_engine(EnginePlacement(layout, tuple(range(layout.ranks))))
    return tuple(elements(weights, shard_map, stage * layout.tp) for stage in range(layout.pp))


@dataclass(frozen=True)
class EngineBytes:
    """Bytes of the weights of an engine on one rank, scales included."""

    dense: float  # bytes outside of experts, that each decoding step reads
    experts: float  # bytes of experts


@cache
def _quantized_stages(weights: ModelTable, layout: EngineLayout, wire: Wire) -> tuple[EngineBytes, ...]:
    """Counts the bytes of quantized weights as the sync sends them, on the first rank of each stage."""
    encoding = encoding_of(wire)
    assert encoding
    whole = weights.shard_map_engine(EnginePlacement(layout, tuple(range(layout.ranks))))
    # The first rank of each stage: the others have shards of the same shapes.
    check_engine_blocks(weights, whole, encoding, [stage * layout.tp for stage in range(layout.pp)])
    # The shard map of the sync, so scales and packing are counted as they are sent.
    target = encoded_maps(weights, whole, whole, encoding).target
    stages = []
    for stage in range(layout.pp):
        sizes = {"dense": 0, "experts": 0}
        for shard in target.shards(stage * layout.tp).values():
            name = shard.pieces[0].tensor if shard.pieces else ""
            entry = weights.tensor_index.entries.get(target.plain_name(name))
            kind = "experts" if entry and entry.of_experts else "dense"
            sizes[kind] += math.prod(shard.shape) * (target.tensors[name].itemsize(BF16_BYTES) if name else BF16_BYTES)
        stages.append(EngineBytes(**sizes))
    return tuple(stages)


def fit_layout(inputs: PlanInputs, layout: Layout) -> Layout:
    """Completes a layout to all ranks of the role; the UserError lists the nearest ones that fit."""
    layout.check_pipeline_layers(inputs.weights.config.layers)
    ranks, experts = len(inputs.placement_ranks), inputs.weights.model_dims.experts
    return resolve_layout(layout, ranks, experts, partial(check, inputs))


def check(inputs: PlanInputs, layout: Layout) -> None:
    """Raises a UserError where a parallel size does not divide what it shards of the role's model."""
    if inputs.options.fsdp:
        sharded_module(inputs, layout)  # divides the real module, and raises where that is not possible
        return
    assert isinstance(inputs.weights, WeightTable)
    inputs.weights.check_training(layout, exchanges_heads=inputs.options.exchanged == "heads")


def check_engine(inputs: PlanInputs, layout: EngineLayout) -> None:
    """Raises a UserError where the model does not admit a layout of engines, or it cuts blocks of quantized weights."""
    inputs.weights.check_engine_layout(layout)
    if inputs.wire != "cast":
        _quantized_stages(inputs.weights, layout, inputs.wire)


def _optimizer_bytes(options: TrainingOptions, e: Elements, layout: Layout) -> int:
    # Rounded up: ranks pad their parts of a buffer to equal sizes.
    dense, experts = -(-e.dense // (layout.dp * layout.cp)), -(-e.experts // layout.edp)
    states = options.state_bytes * (dense + experts) if options.sharded_states else options.state_bytes * e.trained
    states += options.vocabulary_bytes * -(-e.vocabulary // (layout.dp * layout.cp if options.sharded_states else 1))
    return round((1 - options.offloaded_states) * states)


@dataclass(frozen=True)
class RolloutMemory:
    """Memory of an engine's weights and KV cache on a rank of each pipeline stage."""

    layout: EngineLayout
    elements: tuple[Elements, ...]  # elements of the weights, one entry for each stage
    limit: float  # bytes available on a rank for weights and cache together
    per_token: tuple[int, ...]  # bytes of a token in the cache of a rank, one entry for each stage
    stages: tuple[EngineBytes, ...]  # bytes of the weights on a rank, one entry for each stage

    @property
    def cache_bytes(self) -> tuple[float, ...]:
        """Bytes available for the cache; negative where the weights already are too large."""
        return tuple(self.limit - size for size in self.weights)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Bytes of the weights on a rank, one entry for each stage."""
        return tuple(round(stage.dense + stage.experts) for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Capacity of the KV cache of one attention group of an engine, in tokens."""
        # The stage with the least space decides: a sample is in the caches of all stages.
        return max(0, min(int(size // each) for size, each in zip(self.cache_bytes, self.per_token, strict=True)))

    @property
    def tokens_per_engine(self) -> int:
        """Capacity of an engine in tokens: with data-parallel attention each of its groups has a cache."""
        return self.tokens * self.layout.adp


def rollout_memory(inputs: PlanInputs, layout: EngineLayout, limit: float | None = None) -> RolloutMemory:
    """Computes the memory of an engine with `limit` bytes on a rank, None for all usable bytes of a device."""
    counted = _on_engine_stages(inputs.weights, layout)
    per_token = tuple(kv_bytes(inputs.weights, layout, stage) for stage in range(layout.pp))
    if inputs.wire == "cast":
        item = inputs.rollout_bytes
        stages = tuple(EngineBytes(item * e.dense + e.other_bytes, item * e.experts) for e in counted)
    else:
        stages = _quantized_stages(inputs.weights, layout, inputs.wire)
    return RolloutMemory(layout, counted, inputs.usable if limit is None else limit, per_token, stages)


def kv_bytes(weights: ModelTable, layout: EngineLayout, stage: int) -> int:
    """Computes the bytes of one token in the KV cache of a rank."""
    # Grouped attention: keys and values of the rank's heads, at least one, which neighbouring ranks may share. Latent
    # attention: the compressed state and the rotary key (DeepSeek-V2, arXiv:2405.04434, section 2.1), on every rank.
    # Linear attention: nothing, its state has the same size for a sample of any length.
    c = weights.config
    width = (
        c.latent.kv_rank + c.latent.rope_dim if c.latent else 2 * c.head_dim * max(1, c.kv_heads // layout.attention_tp)
    )
    with_cache = sum(not c.has_linear_attention(layer) for layer in layout.layers(c.layers, stage))
    return WEIGHT_BYTES * width * max(1, with_cache)  # 0 would be a cache of any size


def sharded_module(inputs: PlanInputs, layout: Layout) -> ShardedModule:
    """Returns the module of a role under a layout; UserError where the layout does not divide it."""
    assert isinstance(inputs.weights, ModuleTable) and inputs.options.fsdp
    form = form_of_rows(inputs)
    form.check(layout, str(inputs.weights.model_dir / "config.json"))
    return _sharded_module(inputs.weights, form.is_packed, layout, inputs.options.fsdp)


def form_of_rows(inputs: PlanInputs) -> Form:
    """Returns the form in which a role computes rows with the FSDP backend."""
    assert isinstance(inputs.weights, ModuleTable)
    outcome = _form_of(inputs.weights, inputs.sequence)
    if isinstance(outcome, str):
        raise UserError(outcome)
    return outcome


@cache  # equal for every layout, also where no form is right
def _form_of(table: ModuleTable, longest_row: int) -> Form | str:
    try:
        return family_check.form_of(table, longest_row)
    except UserError as error:
        return str(error)


@cache  # equal for every layout with the same tp
def _divided_module(table: ModuleTable, is_packed: bool, tp: int) -> Any:
    return fsdp_module.divided_module(table, is_packed, tp)


@cache  # equal for every batch and all hardware
def _sharded_module(table: ModuleTable, is_packed: bool, layout: Layout, options: FsdpConfig) -> ShardedModule:
    return fsdp_module.ShardedModule(partial(_divided_module, table, is_packed), table, layout, options)


def _module_parts(inputs: PlanInputs, layout: Layout, is_trained: bool) -> dict[str, int]:
    """Computes the bytes of each part of a role's memory on a rank."""
    module, options = sharded_module(inputs, layout), inputs.options
    assert options.fsdp
    on_device = not options.fsdp.cpu_offload
    stored = FLOAT32_BYTES if is_trained else options.weight_bytes
    gathered = _gathered_bytes(module, options.weight_bytes, options.fsdp)
    # Buffers stay on the device, also with weights in host memory.
    parts = {"weights": on_device * stored * module.sharded + module.buffer_bytes}
    if not is_trained:
        return parts | {GATHERED: gathered, ACTIVATIONS: inference_bytes(inputs, layout, 0)}
    parts["gradients"] = on_device * options.gradient_bytes * module.trained
    parts[OPTIMIZER_STATES] = on_device * options.state_bytes * module.trained
    # A layer's gradients are cast when the backward pass has left it, all others at its end.
    rest = options.weight_bytes * module.sharding * module.rest.trained
    layer = max((group.trained for group in module.layers), default=0)
    cast = (options.weight_bytes + FLOAT32_BYTES) * module.sharding * layer
    at_end = FLOAT32_BYTES * module.sharding * module.rest.trained
    parts[GATHERED] = gathered + rest + max(cast, at_end)
    return parts | {ACTIVATIONS: activation_bytes(inputs, layout, 0)}


def _gathered_bytes(module: ShardedModule, item: int, options: FsdpConfig) -> int:
    """Returns the bytes of whole weights that are gathered at the same time; `item`: of one weight."""
    sizes = sorted((group.sharded for group in module.layers), reverse=True)
    layers = sizes[:LAYERS_IN_FLIGHT] if options.reshard_after_forward else sizes
    return item * module.sharding * (module.rest.sharded + sum(layers))


@dataclass(frozen=True)
class MicroBatchBytes:
    """Bytes of the collectives of one micro-batch, of whole tensors: a rank receives all but its own part."""

    gathered: int  # outputs of all-gathers, in the type in which the model computes
    reduced: int  # inputs of reduce-scatters, in float32
    replicated: int  # tensors that are summed over the copies of the model, in float32


def micro_batch_bytes(inputs: PlanInputs, layout: Layout, trains: bool = True) -> MicroBatchBytes:
    """Computes the bytes of the collectives between sharding ranks and between copies, for one micro-batch."""
    module, options = sharded_module(inputs, layout), inputs.options
    assert options.fsdp
    # Layers are gathered again for the backward pass, all else stays gathered between the passes.
    passes = 2 if trains and options.fsdp.reshard_after_forward else 1
    layers = sum(group.sharded for group in module.layers)
    gathered = options.weight_bytes * module.sharding * (passes * layers + module.rest.sharded)
    summed = FLOAT32_BYTES * module.trained if trains else 0
    copies = options.fsdp.replicas > 1
    return MicroBatchBytes(gathered, module.sharding * summed, summed if copies else 0)
