"""Predicted seconds of an iteration of all roles, of generation, and bytes and seconds of the weight sync.

    rollout -> inference (old log-probs, reference log-probs, values) -> update -> weight sync,    and host copies

Roles on the same ranks compute one after the other, roles on disjoint ranks at the same time. With prefetching, rollout
and everything else up to the weight sync take place at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.planner.inputs import GIGA, OPTIMIZER_STATES, WEIGHT_BYTES, PlanInputs
from verl_mg.planner.layer_time import TERA, link_rate
from verl_mg.planner.memory import RolloutMemory, TrainMemory, sharded_module
from verl_mg.reshard import RankTraffic, best_stride, plan
from verl_mg.reshard.encode import encoded_maps
from verl_mg.reshard.encoding import encoding_of
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.weight_table import WeightTable

PARTS = 12  # number of parts of the decoding steps in which the number of running samples is taken as constant
NEAR_RANKS = 8
"""Ranks of an all-reduce for which engines have a kernel of low latency, at most; beyond that they use NCCL."""


@dataclass(frozen=True)
class Seconds:
    """Predicted seconds of each part of an iteration."""

    rollout: float  # seconds of generation
    inference: float  # seconds of log-probs and values of all roles
    update: float  # seconds of the updates of all trained roles
    sync: float  # seconds of the weight sync
    offload: float  # seconds of copies between devices and host
    overhead: float = 0.0  # seconds outside of the other parts
    prefetched: bool = False  # whether the rollout takes place during inference and update

    @property
    def all(self) -> float:
        """Seconds of the whole iteration."""
        training = self.inference + self.update + self.offload
        work = max(self.rollout, training) if self.prefetched else self.rollout + training
        return work + self.sync + self.overhead


def iteration_seconds(
    inputs: PlanInputs, train: TrainMemory, inference: float, update: float, rollout: float, sync: float
) -> Seconds:
    """Combines the seconds of the actor and the engines with the auxiliary roles of the inputs."""
    ranks, others, prefetched = inputs.placement_ranks, inputs.auxiliary_roles, inputs.rollout_ranks > 0
    inference = busiest_rank_seconds([(ranks, inference), *((role.ranks, role.inference_seconds) for role in others)])
    update = busiest_rank_seconds([(ranks, update), *((role.ranks, role.update_seconds) for role in others)])
    offload, overhead = _offload_seconds(inputs, train), inputs.efficiency.iteration
    return Seconds(rollout, inference, update, sync, offload, overhead, inputs.prefetch and prefetched)


def busiest_rank_seconds(work: Iterable[tuple[Collection[int], float]]) -> float:
    """Returns the seconds of the busiest rank, given the ranks and the seconds of each piece of work."""
    busy: dict[int, float] = defaultdict(float)
    for ranks, seconds in work:
        for rank in ranks:
            busy[rank] += seconds
    return max(busy.values(), default=0.0)


def _offload_seconds(inputs: PlanInputs, train: TrainMemory) -> float:
    # A role is offloaded once an iteration, for the engines, or after each part in which it computes where other
    # roles are offloaded too. Optimizer states are copied out and in once; frozen weights are only copied in;
    # gradients are never copied.
    # (ranks, parts, is it trained, parts of an iteration that need its weights)
    roles = [(inputs.placement_ranks, train.parts, True, 3)] if inputs.offload else []
    roles += [
        (role.ranks, role.parts, role.update_seconds > 0, 2 if role.update_seconds > 0 else 1)
        for role in inputs.auxiliary_roles
        if role.offload
    ]
    return busiest_rank_seconds(
        (ranks, _copied_bytes(parts, is_trained, times if len(roles) > 1 else 1) / (GIGA * inputs.host))
        for ranks, parts, is_trained, times in roles
    )


def _copied_bytes(parts: Mapping[str, tuple[int, ...]], is_trained: bool, times: int) -> int:
    """Returns the bytes copied on a rank of the fullest stage, in both directions."""
    weights, states = parts["weights"], parts.get(OPTIMIZER_STATES, (0,) * len(parts["weights"]))
    # Trained weights are copied out and in, frozen ones in: the host has their copy.
    return max((1 + is_trained) * times * weight + 2 * state for weight, state in zip(weights, states, strict=True))


@dataclass(frozen=True)
class Sync:
    """One weight sync, at the stride of engine ranks that moves the fewest bytes."""

    stride: int  # distance between neighbouring ranks of an engine
    received: tuple[int, ...]  # bytes received by each rank
    lower_bound: tuple[int, ...]  # bytes that each rank needs and does not have
    entered: tuple[float, ...]  # bytes that enter each node from other nodes
    seconds: float  # predicted seconds

    @property
    def share_between_nodes(self) -> float:
        """Bytes that enter nodes, relative to those that ranks receive."""
        return sum(self.entered) / max(1, sum(self.received))


def weight_sync(inputs: PlanInputs, train: Layout, rollout: EngineLayout) -> Sync:
    """Plans the weight sync from the actor to the engines, with the plan that a job executes."""
    source = _source_shards(inputs, train.fit(len(inputs.placement_ranks)))
    placement = best_stride(source, inputs.weights, EnginePlacement(rollout, inputs.engine_ranks), inputs.node)
    target, encoding = inputs.weights.shard_map_engine(placement), encoding_of(inputs.wire)
    if encoding:
        maps = encoded_maps(inputs.weights, source, target, encoding)
        source, target = maps.source, maps.target
    traffic = plan(source, target, inputs.node).traffic(WEIGHT_BYTES)
    # Ranks with neither actor nor engine have no traffic.
    of_ranks = [traffic.get(rank, RankTraffic()) for rank in range(inputs.ranks)]
    nodes = [of_ranks[first : first + inputs.node] for first in range(0, inputs.ranks, inputs.node)]
    return Sync(
        placement.stride,
        tuple(rank.received for rank in of_ranks),
        tuple(rank.lower_bound for rank in of_ranks),
        tuple(sum(rank.entered for rank in node) for node in nodes),
        moved_seconds(inputs, sync_seconds(traffic, inputs.intra_node, inputs.inter_node)),
    )


def _source_shards(inputs: PlanInputs, layout: Layout) -> ShardMap:
    if inputs.options.fsdp:
        return sharded_module(inputs, layout).shard_map(inputs.placement_ranks)
    assert isinstance(inputs.weights, WeightTable)
    return inputs.weights.shard_map_megatron(Placement(layout, inputs.placement_ranks))


def moved_seconds(inputs: PlanInputs, at_full_speed: float) -> float:
    """Returns the seconds of a weight sync from its seconds at the full speed of the links; 0 if it moves nothing."""
    e = inputs.efficiency
    return e.sync_start + at_full_speed / e.sync if at_full_speed else 0.0


def sync_seconds(traffic: Mapping[int, RankTraffic], intra_node: float, inter_node: float) -> float:
    """Predicts the seconds of a sync on the slowest rank, at speeds in GB/s."""
    # A rank takes entered / inter_node + (received - entered) / intra_node, as if its two links worked in turn, and
    # not less than sent / intra_node. Latency, contention and copies in memory are left out.
    return max(
        max(t.entered / inter_node + (t.received - t.entered) / intra_node, t.sent / intra_node) / GIGA
        for t in traffic.values()
    )


def gathered_bytes(inputs: PlanInputs, memory: TrainMemory) -> tuple[int, ...]:
    """Computes the bytes that a rank of each stage receives where full tensors are gathered, as verl and slime do."""
    # Every rank materializes every tensor of the model, one after the other, and slices its rollout shard from it: it
    # receives (bytes of the whole model) - (bytes of its shards), whatever the rollout layout is.
    return tuple(inputs.size.bytes - local.bytes(WEIGHT_BYTES) for local in memory.elements)


def rollout_seconds(inputs: PlanInputs, layout: EngineLayout, memory: RolloutMemory) -> float:
    """Predicts the seconds of generating one iteration's samples."""
    # As many samples run together as the KV cache can contain, and a waiting one takes the place of each that is
    # complete. When none waits, the engine continues with fewer and fewer samples until the longest is complete,
    # unless it begins samples of the next iteration (`batches_in_flight`).
    spread, flying = inputs.lengths, inputs.batches_in_flight
    samples = inputs.tokens_per_iteration / spread.mean * layout.ranks / len(inputs.engine_ranks)
    running = max(1.0, min(max(1, flying) * samples, samples_at_once(inputs, layout, memory)))
    # In the steady state samples are at all places of their responses: in the mean, half of it is in the cache.
    half_done = running * (spread.prompt + spread.mean_response / 2)
    full = decode_seconds(inputs, layout, memory, running, half_done)
    waiting = samples if flying else max(0.0, samples - running)
    # Prompts are computed at the speed of large products, without the latencies of decoding steps.
    prefill = samples * inputs.size.row_flops(spread.prompt) / (layout.ranks * inputs.flops * TERA)
    steady = prefill + waiting / running * spread.mean_response * full
    return steady if flying else steady + _until_complete(inputs, layout, memory, running)


def _until_complete(inputs: PlanInputs, layout: EngineLayout, memory: RolloutMemory, running: float) -> float:
    """Predicts the seconds in which `running` samples that begin together become complete."""
    spread, seconds = inputs.lengths, 0.0
    steps = spread.longest_response / PARTS  # each part is predicted by its middle
    for part in range(PARTS):
        step = (part + 0.5) * steps
        left = max(1.0, running * spread.unfinished(step))
        seconds += steps * decode_seconds(inputs, layout, memory, left, left * (spread.prompt + step))
    return seconds


def decode_seconds(
    inputs: PlanInputs, layout: EngineLayout, memory: RolloutMemory, running: float, cached: float
) -> float:
    """Predicts the seconds of one decoding step of an engine: `running` samples with `cached` tokens of all together.

    It reads the weights that the samples use and their cache (Pope et al., arXiv:2211.05102, section 2), or computes
    for longer than that, and waits for latencies of every layer and two all-reduces. With pipeline parallelism each
    stage reads its weights pp times per step, each time for 1 / pp of the samples.
    """
    c, e = inputs.weights.config, inputs.efficiency
    per_token = c.experts.top_k / c.experts.count if c.experts else 1.0
    # Each of the pp groups of samples passes a stage by itself, which reads only the experts of the group's tokens.
    used = 1 - (1 - per_token) ** (running / layout.pp)  # fraction of experts that any of the tokens is routed to
    reads = [
        layout.pp * (part.dense + used * part.experts) + cached / layout.adp * each
        for part, each in zip(memory.stages, memory.per_token, strict=True)
    ]
    compute = 2 * inputs.size.active * running / (layout.ranks * inputs.flops * TERA)
    reading = max(reads) / (inputs.memory_bandwidth * GIGA)
    waiting = (
        e.decode_step
        + e.decode_sample * running
        + c.layers * (e.decode_layer + 2 * _all_reduce(inputs, layout.tp, running))
    )
    return max(reading, compute) + waiting


def samples_at_once(inputs: PlanInputs, layout: EngineLayout, memory: RolloutMemory) -> int:
    """Returns the number of samples of mean length that an engine generates at the same time."""
    capacity = int(memory.tokens // inputs.lengths.mean) * layout.adp
    return min(capacity, inputs.max_running_requests) if inputs.max_running_requests else capacity


def _all_reduce(inputs: PlanInputs, tp: int, tokens: float) -> float:
    """Predicts the seconds of summing hidden states of tokens: latency and 2 (tp - 1) / tp of their bytes."""
    if tp == 1:
        return 0.0
    size = tokens * inputs.weights.config.hidden * WEIGHT_BYTES
    near = tp <= min(inputs.node, NEAR_RANKS)
    latency = inputs.efficiency.all_reduce_near if near else inputs.efficiency.all_reduce_far
    return latency + 2 * (1 - 1 / tp) * size / link_rate(inputs, tp)
