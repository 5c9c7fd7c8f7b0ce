"""Weight sync from the actor into the engines of this job: planned once, transferred after each update."""

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
from verl_mg.distributed.groups import GROUP_TIMEOUT
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
"""Bytes that an engine receives at a time from each rank; two such chunks exist in addition to its weights."""


class WeightSync(Protocol):
    """Transfer of weights to all engines; all ranks call it together."""

    def transfer(self, actor: Actor) -> dict[str, float]:
        """Transfers the actor's weights to all engines; returns bytes and seconds as metrics."""
        ...


class HFEngineSync:
    """Transfer into a module of `transformers` on every rank, in place; parameters that a rank has are shared."""

    def __init__(self, engine: HFEngine) -> None:
        self._engine = engine
        self._schedules: list[Schedule] = []
        self._lower_bound = 0

    def transfer(self, actor: Actor) -> dict[str, float]:
        """Transfers the actor's weights into the module of each rank."""
        started = time.perf_counter()
        self._engine.begin_update()
        self._schedules = self._schedules or list(self._plan(actor))
        runner, target = actor.runner, self._engine.parameters()
        parameters = runner.parameters()
        traffic = [execute(chunk, source_tensors(chunk, runner, parameters), target) for chunk in self._schedules]
        self._engine.end_update(actor.num_updates)
        return transfer_metrics(traffic, self._lower_bound, started)

    def _plan(self, actor: Actor) -> Iterator[Schedule]:
        """Yields the schedules, once: layouts do not change between iterations."""
        rank, ranks, runner = dist.get_rank(), range(dist.get_world_size()), actor.runner
        whole, itemsize = runner.table.shard_map_replicated(ranks), runner.dtype.itemsize
        for chunk in split_into_chunks(whole, ranks[:1], CHUNK_BYTES // itemsize):
            moves = plan(runner.shard_map(), chunk, device.ranks_of_a_node(len(ranks)))
            self._lower_bound += moves.lower_bound(rank, itemsize)
            unchanged = {
                name: alias
                for name, alias in aliases(moves, rank).items()
                if alias.source not in runner.adapted_parameters
            }
            self._engine.share(aliased_parameters(unchanged, runner.parameters()))
            yield schedule(moves, rank, runner.dtype)


@dataclass(frozen=True)
class _Chunk:
    """A part of the weights that is transferred at a time."""

    schedule: Schedule
    """Messages of this rank."""
    shards: Mapping[str, Shard]
    """Shards that this rank assembles for the SGLang rank on its device, by parameter."""
    dtypes: Mapping[str, torch.dtype]
    """Type of each parameter."""


class SGLangEngineSync:
    """Transfer into SGLang: each rank assembles the shard of the SGLang rank on its device and shares its memory."""

    def __init__(self, placement: EnginePlacement, engine: SGLangEngine | None, table: WeightTable) -> None:
        """Creates the groups of the engines' ranks; all ranks call it together.

        Args:
            placement: ranks and layout of the engines.
            engine: on the first rank of each engine, else None.
            table: weight table of the actor, with the engine's traced table where the configuration names one.
        """
        self._placement, self._engine, self._table = placement, engine, table
        self._ranks_of = engine_ranks(placement)
        # Every rank takes part in the creation of every group.
        groups = {number: dist.new_group(ranks, GROUP_TIMEOUT, "gloo") for number, ranks in self._ranks_of.items()}
        self._groups = {rank: groups[number] for number, ranks in self._ranks_of.items() for rank in ranks}
        self._planned = cache(self._plan)

    @property
    def number(self) -> int:
        """Returns the number of this rank's engine."""
        return self._placement.coordinates(dist.get_rank()).engine

    def transfer(self, actor: Actor) -> dict[str, float]:
        """Transfers the actor's weights to all engines."""
        return self._transfer(actor, self._placement)

    def transfer_to_engine(self, actor: Actor, engine: int) -> None:
        """Transfers the weights to an engine that was restarted; the others continue to generate.

        Args:
            actor: has the weights.
            engine: number of the engine.
        """
        self._transfer(actor, EnginePlacement(self._placement.layout, self._ranks_of[engine]))

    def barrier(self) -> None:
        """Waits for the other ranks of this rank's engine."""
        if dist.get_rank() in self._groups:
            dist.barrier(self._groups[dist.get_rank()])

    def _transfer(self, actor: Actor, target: EnginePlacement) -> dict[str, float]:
        started = time.perf_counter()
        chunks, lower_bound = self._planned(actor, target)
        is_target = dist.get_rank() in target.ranks
        engine = self._engine if is_target else None
        if engine:
            _begin_update(engine)
        traffic, loading, parameters = [], None, actor.runner.parameters()
        staged: list[dict[str, Tensor]] = []
        for number, chunk in enumerate(chunks):
            tensors = staging(chunk.shards, chunk.dtypes, device.current_device())
            traffic.append(execute(chunk.schedule, source_tensors(chunk.schedule, actor.runner, parameters), tensors))
            # Keeps the chunk that the engine is still copying, and the next one.
            staged = [*staged[-1:], tensors]
            payloads = self._gather_payloads(tensors) if is_target else []
            if engine:
                if loading is not None:
                    engine.loaded(loading)
                is_last = number == len(chunks) - 1
                loading = engine.load(payloads, actor.num_updates if is_last else None)
        if engine and loading is not None:
            engine.loaded(loading)
            engine.end_update(actor.num_updates)
        self.barrier()
        return transfer_metrics(traffic, lower_bound, started)

    def _gather_payloads(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Returns the payloads of this rank's engine, in the order of SGLang's ranks."""
        return all_gather_json(payload(tensors), self._groups[dist.get_rank()])

    def _plan(self, actor: Actor, placement: EnginePlacement) -> tuple[list[_Chunk], int]:
        """Returns chunks and the lower bound of bytes, once: layouts do not change between iterations."""
        rank, dtype = dist.get_rank(), actor.runner.dtype
        whole = self._table.shard_map_sglang(placement)
        first = placement.ranks[: placement.layout.ranks * placement.stride : placement.stride]
        node = device.ranks_of_a_node(dist.get_world_size())
        chunks, lower_bound = [], 0
        for chunk in split_into_chunks(whole, first, CHUNK_BYTES // dtype.itemsize):
            moves = plan(actor.runner.shard_map(), chunk, node)
            lower_bound += moves.lower_bound(rank, dtype.itemsize)
            shards = chunk.shards(rank)
            dtypes = {
                name: torch.float32 if chunk.tensors[shard.pieces[0].tensor].float32 else dtype
                for name, shard in shards.items()
            }
            chunks.append(_Chunk(schedule(moves, rank, dtype), shards, dtypes))
        return chunks, lower_bound


def source_tensors(chunk: Schedule, runner: ModelRunner, parameters: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns the tensors that this rank's messages of a chunk are taken from, adapters merged into copies.

    Args:
        chunk: the messages.
        runner: of the actor.
        parameters: the runner's parameters.
    """
    if not runner.adapted_parameters:
        return parameters
    used = {copy.source for copy in chunk.copies if not copy.from_target}
    messages = (message for bucket in chunk.buckets for message in bucket.messages)
    used |= {part.parameter for m in messages if m.outgoing and not m.forwarded for part in m.segments}
    merged = runner.merged_parameters()
    return parameters | {name: merged[name] for name in used & runner.adapted_parameters}


def _begin_update(engine: SGLangEngine) -> None:
    """Makes the weights writable; an engine that died while it had no requests is restarted first."""
    try:
        engine.begin_update()
    except EngineDiedError:
        engine.restart()
        engine.begin_update()


def engine_ranks(placement: EnginePlacement) -> dict[int, tuple[int, ...]]:
    """Returns the ranks of each engine, in the order of SGLang's ranks."""
    ranks: dict[int, list[int]] = defaultdict(list)
    at = {rank: placement.coordinates(rank) for rank in placement.ranks}
    for rank in sorted(placement.ranks, key=lambda rank: (at[rank].pp, at[rank].tp)):
        ranks[at[rank].engine].append(rank)
    return {number: tuple(members) for number, members in ranks.items()}


def transfer_metrics(traffic: Sequence[Traffic], lower_bound: int, started: float) -> dict[str, float]:
    """Returns the metrics of a transfer: bytes of all ranks, and this rank's seconds.

    Args:
        traffic: of each chunk.
        lower_bound: the fewest bytes that this rank can receive.
        started: `time.perf_counter()` at the begin.
    """
    moved = {
        "weight_sync/bytes_received": sum(part.bytes_received for part in traffic),
        "weight_sync/bytes_lower_bound": lower_bound,
    }
    return sum_over_ranks([moved]) | {
        "time/weight_sync": time.perf_counter() - started,
        "time/weight_sync_moving": sum(part.seconds for part in traffic),
        "time/weight_sync_packing": sum(part.seconds_packing for part in traffic),
        "time/weight_sync_waiting": sum(part.seconds_waiting for part in traffic),
    }
