"""Weight sync from the actor into the engines of this job: planned once, transferred after each update.

Two chunks are on their way at a time (`ProcessEngineSync`), one between ranks and one into the engine:

    ranks of the job                                      processes of the engine
    receive chunk 0 in memory A
    names of the memory ──▶ leader ──▶ load(chunk 0)  ──▶ copy A into the parameters
    receive chunk 1 in memory B                             meanwhile
    finish_load waits                                 ◀── chunk 0 is copied; A is released, and allocated for chunk 2
    ...                                                   the last chunk carries the new version
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.distributed.collectives import all_gather_json, new_group, sum_over_ranks
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.engines.ipc_payload import Staging, staging_bytes
from verl_mg.engines.patch_payload import PatchStaging
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.layout import EnginePlacement
from verl_mg.reshard import Schedule, Traffic, aliased_parameters, aliases, execute, plan, schedule, split_into_chunks
from verl_mg.reshard.delta_transfer import SentValues, transfer_changes
from verl_mg.reshard.encode import Encoder, encoded_maps
from verl_mg.reshard.encoding import Wire, encoding_of
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.model_table import ModelTable
from verl_mg.training.runner import Runner
from verl_mg.weight_sync.engine_update import EngineUpdate
from verl_mg.weight_sync.policy import Policy

CHUNK_BYTES = 2**30
"""Bytes that an engine receives at a time from each rank; two such chunks exist in addition to its weights."""
MIN_CHUNK_BYTES = 2**26
"""Chunks become as small as this on devices with little free memory."""
KEPT_FREE_BYTES = 2**30
"""Free memory of a device that chunks leave for the buffers of NCCL and of the transfer."""

log = logging.getLogger(__name__)


class WeightSync(Protocol):
    """Transfer of weights to all engines; all ranks call it together."""

    def transfer(self, actor: Policy) -> dict[str, float]:
        """Transfers the actor's weights to all engines; returns bytes and seconds as metrics."""
        ...


class HFEngineSync:
    """Transfer into a module of `transformers` on every rank, in place; parameters that a rank has are shared."""

    def __init__(self, engine: HFEngine) -> None:
        self._engine = engine
        self._schedules: list[Schedule] = []
        self._lower_bound = 0

    def transfer(self, actor: Policy) -> dict[str, float]:
        """Transfers the actor's weights into the module of each rank."""
        started = time.perf_counter()
        self._engine.begin_update()
        self._schedules = self._schedules or list(self._plan(actor))
        runner, target = actor.runner, self._engine.parameters(actor.runner.table.transposed_parameters)
        parameters, wait_for = sources_of(runner)
        traffic = [
            execute(chunk, source_tensors(chunk, runner, parameters), target, wait_for=wait_for)
            for chunk in self._schedules
        ]
        runner.wait_for()  # the module shares memory with parameters that are not transferred
        self._engine.end_update(actor.num_updates)
        return transfer_metrics(traffic, self._lower_bound, started)

    def _plan(self, actor: Policy) -> Iterator[Schedule]:
        """Yields the schedules, once: layouts do not change between iterations."""
        rank, ranks, runner = dist.get_rank(), range(dist.get_world_size()), actor.runner
        whole, itemsize = runner.table.shard_map_replicated(ranks), runner.dtype.itemsize
        for chunk in split_into_chunks(whole, ranks[:1], CHUNK_BYTES // itemsize):
            moves = plan(runner.shard_map(), chunk, device.ranks_of_a_node(len(ranks)))
            self._lower_bound += moves.lower_bound(rank, itemsize)
            # A parameter that this rank has whole and unchanged is shared. Computed ones are new tensors in each sync.
            unchanged = {
                name: alias
                for name, alias in aliases(moves, rank).items()
                if alias.source not in runner.computed_parameters
            }
            shared = aliased_parameters(unchanged, runner.parameters())
            self._engine.share(shared, runner.table.transposed_parameters)
            yield schedule(moves, rank, runner.dtype)


@dataclass(frozen=True, kw_only=True)
class SourceChunk:
    """A part of the weights that is transferred at a time, as this rank sends it."""

    schedule: Schedule
    encoder: Encoder | None = None
    """Encoder of this rank's weights, for quantized engines."""


Part = TypeVar("Part", bound=SourceChunk)


@dataclass(frozen=True, kw_only=True)
class _Chunk(SourceChunk):
    """A part of the weights that this rank also assembles."""

    shards: Mapping[str, Shard]
    """Shards that this rank assembles for the SGLang rank on its device, by parameter."""
    dtypes: Mapping[str, torch.dtype]


@dataclass(frozen=True)
class _Transfer:
    """A transfer to some engines, as this rank takes part in it."""

    chunks: Sequence[_Chunk]
    """Parts in order, as many on every rank."""
    lower_bound: int
    """The fewest bytes that this rank can receive."""

    @property
    def staging_bytes(self) -> int:
        """Size of the largest chunk's memory on this rank: all have it, so that freed memory fits the next chunk."""
        return max((staging_bytes(chunk.shards, chunk.dtypes) for chunk in self.chunks), default=0)


class ProcessEngineSync:
    """Transfer into engines: each rank assembles the shard of the engine's rank on its device and shares its memory.

    `engine` is on the first rank of each engine. `delta` sends only elements that have changed since the last transfer,
    and `merges=False` the weights under adapters.
    """

    def __init__(
        self,
        placement: EnginePlacement,
        groups: Mapping[int, dist.ProcessGroup],
        engine: ProcessEngine | None,
        table: ModelTable,
        wire: Wire = "cast",
        delta: bool = False,
        merges: bool = True,
    ) -> None:
        self._delta, self._merges = delta, merges
        self._sent: dict[int, SentValues] = {}  # by number of the chunk; copies in host memory, to find changes
        self._all_have: tuple[Policy, int] | None = None  # whose weights of which version all engines have
        self._placement, self._engine, self._table, self._encoding = placement, engine, table, encoding_of(wire)
        self._ranks_of = placement.members()
        self._groups = {rank: groups[number] for number, ranks in self._ranks_of.items() for rank in ranks}
        self._planned = cache(self._plan)

    @property
    def placement(self) -> EnginePlacement:
        """Returns ranks and layout of the engines."""
        return self._placement

    @property
    def engine(self) -> ProcessEngine | None:
        """Returns the engine that this rank leads."""
        return self._engine

    def ranks_of(self, engine: int) -> tuple[int, ...]:
        """Returns the ranks of an engine, of which the first one leads it."""
        return self._ranks_of[engine]

    @property
    def number(self) -> int:
        """Returns the number of this rank's engine."""
        return self._placement.coordinates(dist.get_rank()).engine

    def transfer(self, actor: Policy) -> dict[str, float]:
        """Transfers the actor's weights to all engines."""
        return self._transfer(actor, self._placement)

    def transfer_to_engine(self, actor: Policy, engine: int) -> None:
        """Transfers the weights to an engine that was restarted; the others continue to generate."""
        self._transfer(actor, EnginePlacement(self._placement.layout, self._ranks_of[engine]))

    def barrier(self) -> None:
        """Waits for the other ranks of this rank's engine."""
        if dist.get_rank() in self._groups:
            dist.barrier(self._groups[dist.get_rank()])

    def _transfer(self, actor: Policy, target: EnginePlacement) -> dict[str, float]:
        started = time.perf_counter()
        planned = self._planned(actor, target)
        is_target = dist.get_rank() in target.ranks
        update = EngineUpdate(self._engine if is_target else None, actor.num_updates)
        receives = is_target
        traffic: list[Traffic] = []
        # Copies are of what all engines have: a transfer to one engine cannot use or replace them.
        keeps = self._delta and target == self._placement
        intact = False
        if keeps and self._all_have and self._all_have[0] is actor:
            intact = self._load_changes(actor, planned, update, receives, traffic)
            if not intact:
                log.warning("rollout: the weights of an engine differ from those that were sent; all are sent again")
        if not intact:
            self._load_all(actor, planned, update, receives, keeps, traffic)
        if keeps:
            self._all_have = actor, actor.num_updates
        elif self._all_have != (actor, actor.num_updates):
            self._all_have = None  # one engine is newer than the others
        # All ranks report here, so that none releases memory that an engine still reads.
        return transfer_metrics(traffic, planned.lower_bound, started)

    def _load_all(
        self,
        actor: Policy,
        planned: _Transfer,
        update: EngineUpdate,
        receives: bool,
        keeps: bool,
        traffic: list[Traffic],
    ) -> None:
        """Sends all values and loads them into the engines; `keeps` them to find changes in the next transfer."""
        if keeps:
            self._sent = {number: SentValues() for number in range(len(planned.chunks))}
        for number, (chunk, tensors, wait_for) in enumerate(chunk_sources(actor, planned.chunks, self._merges)):
            # One buffer for a chunk, so that an engine opens one handle; of one size for all chunks, so that torch's
            # allocator gives back the memory that the engine has closed.
            filled = Staging(chunk.shards, chunk.dtypes, device.current_device(), planned.staging_bytes)
            traffic.append(execute(chunk.schedule, tensors, filled.tensors, wait_for=wait_for))
            if keeps:
                self._sent[number].keep(chunk.schedule, tensors)
            receives = self._load(update, filled, receives, is_last=number == len(planned.chunks) - 1)
        update.finish_load()

    def _load_changes(
        self, actor: Policy, planned: _Transfer, update: EngineUpdate, receives: bool, traffic: list[Traffic]
    ) -> bool:
        """Sends what has changed; returns whether all engines have the values of the senders then."""
        # Checksums of the boxes decide: an engine may have missed a transfer, or its memory was overwritten.
        patched = []
        for number, (chunk, tensors, wait_for) in enumerate(chunk_sources(actor, planned.chunks, self._merges)):
            patches, counted = transfer_changes(chunk.schedule, tensors, self._sent[number], wait_for=wait_for)
            traffic.append(counted)
            patched.append(PatchStaging(patches, device.current_device()))
            receives = self._load(update, patched[-1], receives, is_last=number == len(planned.chunks) - 1)
        update.finish_load()
        # An engine that died is restarted, and then receives all values.
        intact = not receives or update.died or all(part.intact() for part in patched)
        return all(all_gather_json(intact))

    def _load(self, update: EngineUpdate, filled: Staging | PatchStaging, receives: bool, is_last: bool) -> bool:
        """Loads the memory of all ranks of this rank's engine; returns whether the engine is alive."""
        update.finish_load()  # of the chunk before: its memory is released when this one replaces it
        if not receives:
            return False
        payloads = self._gather_payloads(None if update.died else filled.payload())
        if None in payloads:  # the leader's engine has died; its ranks still send and receive what others wait for
            return False
        update.load(filled, payloads, is_last=is_last)
        return True

    def _gather_payloads(self, payload: str | None) -> list[str]:
        """Returns the payloads of this rank's engine, in the order of SGLang's ranks."""
        return all_gather_json(payload, self._groups[dist.get_rank()])

    def _plan(self, actor: Policy, placement: EnginePlacement) -> _Transfer:
        """Returns the transfer, once: layouts do not change between iterations. All ranks call it together."""
        rank, dtype = dist.get_rank(), actor.runner.dtype
        whole = self._table.shard_map_engine(placement)
        # Engines are alike, so the ranks of the first one decide how large chunks are.
        first = placement.ranks[: placement.layout.ranks * placement.stride : placement.stride]
        node = device.ranks_of_a_node(dist.get_world_size())
        # Memory is measured as it is during transfers: with the actor's weights on the device, and torch's cache empty.
        device.release_unused_memory()
        max_bytes = fitting_chunk_bytes(all_gather_json(device.free_memory()))
        chunks, lower_bound, source = [], 0, actor.runner.shard_map()
        maps = encoded_maps(self._table, source, whole, self._encoding) if self._encoding else None
        target, together = (maps.target, maps.keep_together) if maps else (whole, ())
        for chunk in split_into_chunks(target, first, max_bytes // dtype.itemsize, together):
            part = maps.source.part(list(chunk.tensors)) if maps else None
            moves = plan(part or source, chunk, node)
            lower_bound += moves.lower_bound(rank, dtype.itemsize)
            shards = chunk.shards(rank)
            dtypes = {name: chunk.tensors[shard.pieces[0].tensor].wire_dtype(dtype) for name, shard in shards.items()}
            messages = schedule(moves, rank, dtype)
            encoder = Encoder(part, messages, dtype) if part else None
            chunks.append(_Chunk(schedule=messages, shards=shards, dtypes=dtypes, encoder=encoder))
        return _Transfer(chunks, lower_bound)


def chunk_sources(
    actor: Policy, chunks: Iterable[Part], merges: bool = True
) -> Iterator[tuple[Part, Mapping[str, Tensor], Callable[[str], None] | None]]:
    """Yields each chunk with the tensors that its messages are taken from, and a function that waits for them."""
    # All ranks have the same number of chunks, because encoding one is a collective: ranks agree on the scales of
    # blocks that they share.
    parameters, wait_for = sources_of(actor.runner)
    for chunk in chunks:
        messages = chunk.encoder or chunk.schedule
        tensors = source_tensors(messages, actor.runner, parameters) if merges else parameters
        if chunk.encoder:
            yield chunk, chunk.encoder.run(tensors, wait_for).tensors, None
        else:
            yield chunk, tensors, wait_for


def fitting_chunk_bytes(free: Sequence[int | None]) -> int:
    """Returns the size of chunks of which two fit each device, from its free bytes, None on the CPU."""
    # CHUNK_BYTES, or half of it as often as needed: 4 GiB free leave 3 for chunks of 1 GiB; 2 GiB leave 1 for chunks of
    # 512 MiB.
    usable = [size - KEPT_FREE_BYTES for size in free if size is not None]
    chunk = CHUNK_BYTES
    while usable and 2 * chunk > min(usable) and chunk > MIN_CHUNK_BYTES:
        chunk //= 2
    return chunk


def sources_of(runner: Runner) -> tuple[dict[str, Tensor], Callable[[str], None]]:
    """Returns the parameters that are transferred, and a function that waits for the values of one of them."""
    # Later parameters can still be gathered while earlier ones are sent. Merged adapters are read as a whole.
    parameters = runner.parameters(complete=runner.lora is not None)
    return parameters, lambda name: runner.wait_for([parameters[name]])


def source_tensors(chunk: Schedule | Encoder, runner: Runner, parameters: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns the tensors that this rank's messages of a chunk are taken from, computed ones as copies."""
    if not runner.computed_parameters:
        return parameters
    served = runner.served_parameters()
    return parameters | {name: served[name] for name in chunk.source_parameters & runner.computed_parameters}


def engine_groups(placement: EnginePlacement) -> dict[int, dist.ProcessGroup]:
    """Creates a group of the ranks of each engine, by its number; all ranks call it together."""
    # torch requires every rank to take part in the creation of every group. gloo, for JSON and barriers of the host.
    return {number: new_group(ranks, "gloo") for number, ranks in placement.members().items()}


def transfer_metrics(traffic: Sequence[Traffic], lower_bound: int, started: float) -> dict[str, float]:
    """Returns the metrics of a transfer: bytes of all ranks, and this rank's seconds.

    `lower_bound`: the fewest bytes that this rank can receive. `started`: `time.perf_counter()` at the begin.
    """
    moved = {
        "weight_sync/bytes_received": sum(part.bytes_received for part in traffic),
        "weight_sync/bytes_lower_bound": lower_bound,
    }
    times = {
        "time/weight_sync": time.perf_counter() - started,
        "time/weight_sync_moving": sum(part.seconds for part in traffic),
    }
    if not torch.cuda.is_available():  # on a GPU the host only launches packing and transfers
        times["time/weight_sync_packing"] = sum(part.seconds_packing for part in traffic)
        times["time/weight_sync_waiting"] = sum(part.seconds_waiting for part in traffic)
    return sum_over_ranks([moved]) | times
