"""Bytes on the device of one rank, stage by stage: all ranks of a pipeline stage hold equally much."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.paper.activations import activation_bytes
from verl_mg.paper.setting import WEIGHT_BYTES, Setting
from verl_mg.weights import Holdings, Shard, WeightTable

GRADIENT_BYTES = 4
OPTIMIZER_BYTES = 12  # the main weight and Adam's two moments, each float32


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


def elements(weights: WeightTable, holdings: Holdings, rank: int) -> Elements:
    """Counted in the shards of the weight table."""
    counts = {"dense": 0, "experts": 0, "float32": 0}
    for shard in holdings.shards(rank).values():
        counts[_kind(weights, shard)] += math.prod(shard.shape)
    return Elements(**counts)


def _kind(weights: WeightTable, shard: Shard) -> str:
    if not shard.pieces:
        return "dense"  # nothing but padding, which only vocabularies have
    entry = weights.catalogue.entries[shard.pieces[0].tensor]
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


def train_memory(setting: Setting, layout: Layout) -> TrainMemory:
    """What training keeps on a rank of each stage; `layout` stands on all ranks of the setting."""
    holdings = setting.weights.on_megatron(Placement.on(layout, setting.ranks))
    stages = range(layout.pp)
    counted = tuple(elements(setting.weights, holdings, layout.rank_of(pp=stage)) for stage in stages)
    parts = {
        "weights": tuple(e.bytes for e in counted),
        "gradients": tuple(GRADIENT_BYTES * (e.dense + e.experts) for e in counted),
        "optimizer states": tuple(_optimizer_bytes(e, layout) for e in counted),
        "activations": tuple(activation_bytes(setting, layout, stage) for stage in stages),
    }
    return TrainMemory(counted, parts)


def _optimizer_bytes(e: Elements, layout: Layout) -> int:
    dense, experts = -(-e.dense // (layout.dp * layout.cp)), -(-e.experts // layout.edp)
    return OPTIMIZER_BYTES * (dense + experts)


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes of the weights, of the room left for the KV cache, and of a token in it, for each pipeline stage.

    `room` is negative where the weights alone are too large.
    """

    layout: EngineLayout
    elements: tuple[Elements, ...]
    room: tuple[float, ...]
    per_token: tuple[int, ...]

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


def rollout_memory(setting: Setting, layout: EngineLayout) -> RolloutMemory:
    """What an engine has on a rank of each stage: device memory less the reserve and the weights is KV cache."""
    holdings = setting.weights.on_sglang(EnginePlacement(layout, tuple(range(layout.ranks))))
    stages = range(layout.pp)
    counted = tuple(elements(setting.weights, holdings, stage * layout.tp) for stage in stages)
    room = tuple(setting.usable - e.bytes for e in counted)
    return RolloutMemory(layout, counted, room, tuple(kv_bytes(setting.weights, layout, stage) for stage in stages))


def kv_bytes(weights: WeightTable, layout: EngineLayout, stage: int) -> int:
    """Bytes that one token takes in the KV cache of a rank.

    Grouped attention: keys and values of the rank's heads, at least one, which neighbours may share. Latent
    attention: the compressed state and the rotary key (DeepSeek-V2, arXiv:2405.04434, section 2.1), on every rank.
    """
    c = weights.config
    width = (
        c.latent.kv_rank + c.latent.rope_dim
        if c.latent
        else 2 * c.head_dim * max(1, c.kv_heads // layout.attention_tp)
    )
    return WEIGHT_BYTES * width * len(layout.layers(c.layers, stage))


def problem(setting: Setting, train: TrainMemory | None, rollout: RolloutMemory | None) -> str | None:
    """Which phase of the job is too large for the device and by which part, or None where it fits."""
    phases: dict[str, dict[str, float]] = {}
    if train:
        stage = train.totals.index(max(train.totals))
        phases["training"] = {name: sizes[stage] for name, sizes in train.parts.items()}
    if rollout:
        phases["generation"] = {
            "rollout weights": max(rollout.weights),
            f"the KV cache of one sample of {setting.sequence} tokens": setting.sequence * max(rollout.per_token),
        }
    if train and rollout:
        phases["the weight sync"] = {
            "training weights": max(train.parts["weights"]),
            "rollout weights": max(rollout.weights),
        }
    for phase, parts in phases.items():
        if sum(parts.values()) > setting.usable:
            largest = max(parts, key=lambda name: parts[name])
            return (
                f"{phase} needs {_gib(sum(parts.values()))} GiB on a rank and has {_gib(setting.usable)}; "
                f"{_gib(parts[largest])} GiB of that are {largest}"
            )
    return None


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f}"
