"""Bytes on the device of one rank, stage by stage: all ranks of a pipeline stage hold equally much."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.planner.inputs import WEIGHT_BYTES, PlanInputs
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.weight_table import WeightTable

GRADIENT_BYTES = 4
OPTIMIZER_BYTES = 12  # the main weight and Adam's two moments, each float32
OPTIMIZER_STATES = "optimizer states"
ACTIVATIONS = "activations"  # what a role keeps only while it computes


@dataclass(frozen=True)
class Elements:
    """Elements of the parameters of one rank, padding included; float32 ones (router bias) have no gradient."""

    dense: int
    experts: int
    float32: int

    @property
    def bytes(self) -> int:
        """Bytes of the weights."""
        return WEIGHT_BYTES * (self.dense + self.experts) + 4 * self.float32


def elements(weights: WeightTable, shard_map: ShardMap, rank: int) -> Elements:
    """Counted in the shards of the weight table."""
    counts = {"dense": 0, "experts": 0, "float32": 0}
    for shard in shard_map.shards(rank).values():
        counts[_kind(weights, shard)] += math.prod(shard.shape)
    return Elements(**counts)


def _kind(weights: WeightTable, shard: Shard) -> str:
    if not shard.pieces:
        return "dense"  # nothing but padding, which only vocabularies have
    entry = weights.tensor_index.entries[shard.pieces[0].tensor]
    if entry.tensor.float32:
        return "float32"
    return "dense" if entry.expert is None else "experts"


@dataclass(frozen=True)
class TrainMemory:
    """Bytes of each part, an entry for each pipeline stage."""

    elements: tuple[Elements, ...]
    parts: Mapping[str, tuple[int, ...]]

    @property
    def totals(self) -> tuple[int, ...]:
        """All parts together."""
        return tuple(sum(sizes) for sizes in zip(*self.parts.values(), strict=True))


def train_memory(setting: PlanInputs, layout: Layout) -> TrainMemory:
    """What training keeps on a rank of each stage; `layout` stands on all ranks of the setting's role."""
    counted = _on_stages(setting.weights, layout.fit(len(setting.standing)))
    parts = {
        "weights": tuple(e.bytes for e in counted),
        "gradients": tuple(GRADIENT_BYTES * (e.dense + e.experts) for e in counted),
        OPTIMIZER_STATES: tuple(_optimizer_bytes(e, layout) for e in counted),
        ACTIVATIONS: tuple(activation_bytes(setting, layout, stage) for stage in range(layout.pp)),
    }
    return TrainMemory(counted, parts)


def frozen_memory(setting: PlanInputs, layout: Layout) -> TrainMemory:
    """The same of a model that only judges."""
    counted = _on_stages(setting.weights, layout.fit(len(setting.standing)))
    activations = tuple(inference_bytes(setting, layout, stage) for stage in range(layout.pp))
    return TrainMemory(counted, {"weights": tuple(e.bytes for e in counted), ACTIVATIONS: activations})


@cache  # the same for every batch, and for every role of the same model
def _on_stages(weights: WeightTable, layout: Layout) -> tuple[Elements, ...]:
    shard_map = weights.shard_map_megatron(Placement.on(layout, layout.ranks))
    return tuple(elements(weights, shard_map, layout.rank_of(pp=stage)) for stage in range(layout.pp))


@cache
def _on_engine_stages(weights: WeightTable, layout: EngineLayout) -> tuple[Elements, ...]:
    shard_map = weights.shard_map_sglang(EnginePlacement(layout, tuple(range(layout.ranks))))
    return tuple(elements(weights, shard_map, stage * layout.tp) for stage in range(layout.pp))


def _optimizer_bytes(e: Elements, layout: Layout) -> int:
    dense, experts = -(-e.dense // (layout.dp * layout.cp)), -(-e.experts // layout.edp)
    return OPTIMIZER_BYTES * (dense + experts)


@dataclass(frozen=True)
class RolloutMemory:
    """An engine's weights and key-value cache, an entry for each pipeline stage.

    limit: bytes that both together have on a rank. per_token: bytes of a token in the cache.
    """

    layout: EngineLayout
    elements: tuple[Elements, ...]
    limit: float
    per_token: tuple[int, ...]

    @property
    def room(self) -> tuple[float, ...]:
        """Bytes left for the cache; negative where the weights alone are too large."""
        return tuple(self.limit - size for size in self.weights)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Bytes of the weights."""
        return tuple(e.bytes for e in self.elements)

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache of one attention group of an engine has room for."""
        return max(0, min(int(room // each) for room, each in zip(self.room, self.per_token, strict=True)))

    @property
    def tokens_per_engine(self) -> int:
        """... of a whole engine: with data-parallel attention its groups have caches of their own."""
        return self.tokens * self.layout.adp


def rollout_memory(setting: PlanInputs, layout: EngineLayout, limit: float | None = None) -> RolloutMemory:
    """What an engine has on a rank of each stage, all that a device has unless `limit` is given."""
    counted = _on_engine_stages(setting.weights, layout)
    per_token = tuple(kv_bytes(setting.weights, layout, stage) for stage in range(layout.pp))
    return RolloutMemory(layout, counted, setting.usable if limit is None else limit, per_token)


def kv_bytes(weights: WeightTable, layout: EngineLayout, stage: int) -> int:
    """Bytes that one token takes in the KV cache of a rank.

    Grouped attention: keys and values of the rank's heads, at least one, which neighbours may share. Latent
    attention: the compressed state and the rotary key (DeepSeek-V2, arXiv:2405.04434, section 2.1), on every rank.
    """
    c = weights.config
    width = (
        c.latent.kv_rank + c.latent.rope_dim if c.latent else 2 * c.head_dim * max(1, c.kv_heads // layout.attention_tp)
    )
    return WEIGHT_BYTES * width * len(layout.layers(c.layers, stage))


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
