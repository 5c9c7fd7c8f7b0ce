"""Predicted seconds of an iteration: samples are drawn, roles judge them, roles learn, weights move to the engines.

    rollout -> judging (old log-probabilities, references, values) -> update -> sync,    and copies to and from the host

Roles on the same ranks work one after the other, roles on other ranks at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from verl_mg.planner.inputs import GIGA, PlanInputs
from verl_mg.planner.memory import OPTIMIZER_STATES, TrainMemory


@dataclass(frozen=True)
class Seconds:
    """Of each part of an iteration."""

    rollout: float
    judging: float
    update: float
    sync: float
    offload: float

    @property
    def all(self) -> float:
        """Of the iteration."""
        return self.rollout + self.judging + self.update + self.sync + self.offload


def iteration_seconds(
    setting: PlanInputs, train: TrainMemory, judging: float, update: float, rollout: float, sync: float
) -> Seconds:
    """judging, update: the actor's own seconds; those of the roles beside it are in the setting."""
    others = setting.beside
    return Seconds(
        rollout,
        side_by_side([(setting.standing, judging), *((role.ranks, role.judging) for role in others)]),
        side_by_side([(setting.standing, update), *((role.ranks, role.seconds) for role in others)]),
        sync,
        _offload_seconds(setting, train),
    )


def side_by_side(work: Iterable[tuple[Collection[int], float]]) -> float:
    """Seconds until the busiest rank is done with all that is done on it."""
    busy: dict[int, float] = defaultdict(float)
    for ranks, seconds in work:
        for rank in ranks:
            busy[rank] += seconds
    return max(busy.values(), default=0.0)


def _offload_seconds(setting: PlanInputs, train: TrainMemory) -> float:
    """Copies between device and host, at the setting's speed.

    A role leaves once an iteration, for the engines, or after each part in which it works, where others wait too. What
    it learns with leaves and comes once; weights that do not change only come; gradients are never copied.
    """
    roles = [(setting.standing, train.parts, True, 3)] if setting.offload else []
    roles += [
        (role.ranks, role.parts, role.seconds > 0, 2 if role.seconds > 0 else 1)
        for role in setting.beside
        if role.offload
    ]
    return side_by_side(
        (ranks, _copied(parts, learns, parts_of_iteration if len(roles) > 1 else 1) / (GIGA * setting.host))
        for ranks, parts, learns, parts_of_iteration in roles
    )


def _copied(parts: Mapping[str, tuple[int, ...]], learns: bool, times: int) -> int:
    """Bytes of the fullest stage, both ways."""
    weights, states = parts["weights"], parts.get(OPTIMIZER_STATES, (0,) * len(parts["weights"]))
    return max((1 + learns) * times * weight + 2 * state for weight, state in zip(weights, states, strict=True))


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
