"""Bytes on the device of one rank, stage by stage: all ranks of a pipeline stage hold equally much."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.planner.activations import activation_bytes, inference_bytes
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
