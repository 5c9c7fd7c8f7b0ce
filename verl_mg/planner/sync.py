"""Bytes and seconds of one weight sync, from the ranks of training to those of the engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.planner.inputs import GIGA, WEIGHT_BYTES, PlanInputs
from verl_mg.planner.memory import TrainMemory
from verl_mg.reshard import RankTraffic, best_stride, plan

NOTHING = RankTraffic()
"""Of a rank with neither actor nor engine."""


@dataclass(frozen=True)
class Sync:
    """One weight sync at the stride that moves least. Bytes: an entry for each rank, `entered` for each node."""

    stride: int
    received: tuple[int, ...]
    lower_bound: tuple[int, ...]
    entered: tuple[float, ...]
    seconds: float


def weight_sync(setting: PlanInputs, train: Layout, rollout: EngineLayout) -> Sync:
    """The sync from Megatron's layout to SGLang's, by the same plan that carries it out."""
    ranks = tuple(range(setting.ranks))
    source = setting.weights.shard_map_megatron(Placement(train.fit(len(setting.standing)), setting.standing))
    placement = best_stride(source, setting.weights, EnginePlacement(rollout, setting.engine_ranks), setting.node)
    traffic = plan(source, setting.weights.shard_map_sglang(placement), setting.node).traffic(WEIGHT_BYTES)
    nodes = [ranks[first : first + setting.node] for first in range(0, setting.ranks, setting.node)]
    return Sync(
        placement.stride,
        tuple(traffic.get(rank, NOTHING).received for rank in ranks),
        tuple(traffic.get(rank, NOTHING).lower_bound for rank in ranks),
        tuple(sum(traffic.get(rank, NOTHING).entered for rank in node) for node in nodes),
        sync_seconds(traffic, setting.intra_node, setting.inter_node),
    )


def sync_seconds(traffic: Mapping[int, RankTraffic], intra_node: float, inter_node: float) -> float:
    """Seconds until the slowest rank is done; link speeds in GB/s of a rank.

    A rank takes entered / inter_node + (received - entered) / intra_node, as if its two links worked in turn, and
    not less than sent / intra_node. Latency, contention and copies in memory are left out.
    """
    return max(
        max(t.entered / inter_node + (t.received - t.entered) / intra_node, t.sent / intra_node) / GIGA
        for t in traffic.values()
    )


def gathered_bytes(setting: PlanInputs, memory: TrainMemory) -> tuple[int, ...]:
    """Bytes that a rank of each stage receives where full tensors are gathered, as verl and slime do.

    Every rank materialises every tensor of the model, one after the other, and cuts its rollout shard out of it:
    it receives (bytes of the whole model) - (bytes that it holds), whatever the rollout layout is.
    """
    return tuple(setting.weight_bytes - held for held in memory.parts["weights"])
