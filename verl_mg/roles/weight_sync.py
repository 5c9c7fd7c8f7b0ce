"""The actor's weights on their way into the rollout engines: planned once, moved after each update."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.distributed.collectives import all_gather_json, sum_over_ranks
from verl_mg.layout import EnginePlacement
from verl_mg.megatron.model_runner import ModelRunner
from verl_mg.reshard import Schedule, Traffic, aliased_parameters, aliases, execute, plan, schedule, split_into_chunks
from verl_mg.roles.models import Actor
from verl_mg.rollout.engine import EngineDiedError
from verl_mg.rollout.hf.engine import HFEngine
from verl_mg.rollout.sglang.engine import SGLangEngine
from verl_mg.rollout.sglang.ipc_payload import payload, staging
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.weight_table import WeightTable

CHUNK_BYTES = 2**30
"""An engine takes about so much at a time from each rank; two such portions stand beside its weights."""


class WeightSync(Protocol):
    """Called by all ranks together."""

    def sync(self, actor: Actor) -> dict[str, float]:
        """Bring the weights to all engines; what that took."""
        ...


class HFEngineSync:
    """Into a module of `transformers` on every rank, in place; what a rank holds already is shared, not copied."""

    def __init__(self, engine: HFEngine) -> None:
        self._engine = engine
        self._schedules: list[Schedule] = []
        self._lower_bound = 0

    def sync(self, actor: Actor) -> dict[str, float]:
        """See `WeightSync`."""
        started = time.perf_counter()
        self._engine.begin_update()
        self._schedules = self._schedules or list(self._plan(actor))
        runner, target = actor.runner, self._engine.parameters()
        own = runner.parameters()
        traffic = [execute(portion, sources(portion, runner, own), target) for portion in self._schedules]
        self._engine.end_update(actor.num_updates)
        return report(traffic, self._lower_bound, started)

    def _plan(self, actor: Actor) -> Iterator[Schedule]:
        """Made once: layouts do not change between iterations."""
        rank, ranks, runner = dist.get_rank(), range(dist.get_world_size()), actor.runner
        whole, size = runner.table.shard_map_replicated(ranks), runner.dtype.itemsize
        for portion in split_into_chunks(whole, ranks[:1], CHUNK_BYTES // size):
            moves = plan(runner.shard_map(), portion, device.ranks_of_a_node(len(ranks)))
            self._lower_bound += moves.lower_bound(rank, size)
            found = aliases(moves, rank)
            as_they_are = {
                name: alias for name, alias in found.items() if alias.source not in runner.adapted_parameters
            }
            self._engine.share(aliased_parameters(as_they_are, runner.parameters()))
            yield schedule(moves, rank, runner.dtype)


@dataclass(frozen=True)
class _Portion:
    """What one rank does for a portion, and the shards that it puts together for the rank of SGLang beside it."""

    schedule: Schedule
    shards: Mapping[str, Shard]
    dtypes: Mapping[str, torch.dtype]


class SGLangEngineSync:
    """Into SGLang: each rank puts together the shard of the SGLang rank on its device and hands over its memory.

    engine: on the first rank of each engine of the placement, else None. table: weight table of the actor, with the
    traced table of the engine where the configuration names one.
    """

    def __init__(self, placement: EnginePlacement, engine: SGLangEngine | None, table: WeightTable) -> None:
        self._placement, self._engine, self._table = placement, engine, table
        self._ranks_of = engine_ranks(placement)
        # Every rank takes part in the making of every group.
        made = {number: dist.new_group(ranks, backend="gloo") for number, ranks in self._ranks_of.items()}
        self._groups = {rank: made[number] for number, ranks in self._ranks_of.items() for rank in ranks}
        self._planned = cache(self._plan)

    @property
    def number(self) -> int:
        """Of this rank's engine."""
        return self._placement.coordinates(dist.get_rank()).engine

    def sync(self, actor: Actor) -> dict[str, float]:
        """See `WeightSync`."""
        return self._bring(actor, self._placement)

    def sync_one(self, actor: Actor, engine: int) -> None:
        """Bring the weights to one engine, which was started anew; the others go on with their samples."""
        self._bring(actor, EnginePlacement(self._placement.layout, self._ranks_of[engine]))

    def _bring(self, actor: Actor, target: EnginePlacement) -> dict[str, float]:
        started = time.perf_counter()
        planned, lower_bound = self._planned(actor, target)
        here = dist.get_rank() in target.ranks
        engine = self._engine if here else None
        if engine:
            _open(engine)
        traffic, loading, parameters = [], None, actor.runner.parameters()
        staged: list[dict[str, Tensor]] = []
        for number, portion in enumerate(planned):
            tensors = staging(portion.shards, portion.dtypes, device.current_device())
            traffic.append(execute(portion.schedule, sources(portion.schedule, actor.runner, parameters), tensors))
            # What the engine is still copying, and what comes next.
            staged = [*staged[-1:], tensors]
            payloads = self._handles(tensors) if here else []
            if engine:
                if loading is not None:
                    engine.loaded(loading)
                last = number == len(planned) - 1
                loading = engine.load(payloads, actor.num_updates if last else None)
        if engine and loading is not None:
            engine.loaded(loading)
            engine.end_update(actor.num_updates)
        self.meet()
        return report(traffic, lower_bound, started)

    def meet(self) -> None:
        """Wait for the other ranks of this rank's engine."""
        if dist.get_rank() in self._groups:
            dist.barrier(self._groups[dist.get_rank()])

    def _handles(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """The payloads of this rank's engine, in the order of SGLang's ranks."""
        return all_gather_json(payload(tensors), self._groups[dist.get_rank()])

    def _plan(self, actor: Actor, placement: EnginePlacement) -> tuple[list[_Portion], int]:
        """Made once: layouts do not change between iterations."""
        rank, dtype = dist.get_rank(), actor.runner.dtype
        whole = self._table.shard_map_sglang(placement)
        first = placement.ranks[: placement.layout.ranks * placement.stride : placement.stride]
        node = device.ranks_of_a_node(dist.get_world_size())
        planned, lower_bound = [], 0
        for portion in split_into_chunks(whole, first, CHUNK_BYTES // dtype.itemsize):
            moves = plan(actor.runner.shard_map(), portion, node)
            lower_bound += moves.lower_bound(rank, dtype.itemsize)
            shards = portion.shards(rank)
            dtypes = {
                name: torch.float32 if portion.tensors[shard.pieces[0].tensor].float32 else dtype
                for name, shard in shards.items()
            }
            planned.append(_Portion(schedule(moves, rank, dtype), shards, dtypes))
        return planned, lower_bound


def sources(portion: Schedule, runner: ModelRunner, own: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """What a rank's part of a portion is taken from: the network's `own` parameters, with the adapters of those that it
    takes merged into copies.
    """
    if not runner.adapted_parameters:
        return own
    taken = {copy.source for copy in portion.copies if not copy.from_target}
    messages = (message for bucket in portion.buckets for message in bucket.messages)
    taken |= {part.parameter for m in messages if m.outgoing and not m.forwarded for part in m.segments}
    served = runner.merged_parameters()
    return own | {name: served[name] for name in taken & runner.adapted_parameters}


def _open(engine: SGLangEngine) -> None:
    """Open the weights for writing; where the engine died while nobody asked it for anything, those of a new one."""
    try:
        engine.begin_update()
    except EngineDiedError:
        engine.restart()
        engine.begin_update()


def engine_ranks(placement: EnginePlacement) -> dict[int, tuple[int, ...]]:
    """The ranks of each engine, in the order of SGLang's."""
    ranks: dict[int, list[int]] = defaultdict(list)
    at = {rank: placement.coordinates(rank) for rank in placement.ranks}
    for rank in sorted(placement.ranks, key=lambda rank: (at[rank].pp, at[rank].tp)):
        ranks[at[rank].engine].append(rank)
    return {number: tuple(own) for number, own in ranks.items()}


def report(traffic: Sequence[Traffic], lower_bound: int, started: float) -> dict[str, float]:
    """The metrics of a sync that began at `started`: bytes of all ranks, and this rank's seconds."""
    moved = {
        "sync/bytes_received": sum(part.bytes_received for part in traffic),
        "sync/bytes_lower_bound": lower_bound,
    }
    return sum_over_ranks([moved]) | {
        "time/sync": time.perf_counter() - started,
        "time/sync_moving": sum(part.seconds for part in traffic),
        "time/sync_packing": sum(part.seconds_packing for part in traffic),
        "time/sync_waiting": sum(part.seconds_waiting for part in traffic),
    }
