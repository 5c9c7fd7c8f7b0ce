"""`TransferPlan`: what a transfer of weights moves, in which chunks, and the fewest bytes that it can move.

    shards of a runner on the ranks of the job        target: engines, servers, a module or whole tensors
      |  cut into chunks, so that memory for staging, merged adapters and quantized values is that of one chunk
      v
    moves of all ranks (`reshard.plan`)  -->  messages of this rank, and of the receivers that it plans for
      |  in each transfer, chunk by chunk: adapters are merged, weights are quantized
      v
    `ChunkValues`  -->  a transport sends them

A plan is made once for a source and a target, as all ranks call it together, and used for every transfer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.distributed.collectives import sum_over_ranks
from verl_mg.engines.payloads import staging_bytes
from verl_mg.layout import EnginePlacement
from verl_mg.models.tensor_index import TensorInfo
from verl_mg.reshard import Schedule, Traffic, execute, plan, schedule, split_into_chunks
from verl_mg.reshard.delta import Patch
from verl_mg.reshard.delta_transfer import SentValues, transfer_changes
from verl_mg.reshard.encode import EncodedMaps, Encoder, encoded_maps
from verl_mg.reshard.encoding import Wire, encoding_of
from verl_mg.reshard.execute import Sources
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.shard_map import JoinedShardMap, ShardMap
from verl_mg.training.runner import Runner

CHUNK_BYTES = 2**30
"""Bytes that a receiver has of a chunk; engines of the job have two such chunks in addition to their weights."""
MIN_CHUNK_BYTES = 2**26
"""Chunks become as small as this on devices with little free memory."""
KEPT_FREE_BYTES = 2**30
"""Free memory of a device that chunks leave for the buffers of NCCL and of the transfer."""


@dataclass(frozen=True)
class SourceWeights:
    """Weights of one version on the ranks of a runner, as transports take them."""

    runner: Runner
    version: int
    """Updates since the start of the job."""
    save: Callable[[Path, Path], None]
    """Writes a Hugging Face directory, with everything else copied from another one; all ranks call it together."""


@dataclass(frozen=True)
class Chunk:
    """A part of the weights that is transferred at a time, as this rank takes part in it."""

    tensors: Mapping[str, TensorInfo]
    schedule: Schedule
    encoder: Encoder | None
    """Encoder of this rank's weights, for quantized engines."""
    shards: Mapping[str, Shard]
    """Shards that this rank receives, by parameter."""
    dtypes: Mapping[str, torch.dtype]
    """Dtypes in which these travel."""
    received: Mapping[int, Schedule]
    """Schedules of the receivers that this rank plans for."""


@dataclass(frozen=True)
class TransferPlan:
    """Chunks of a transfer, as many on every rank.

    Rank 0 has rows 0:2 of t (4, 2) and all of u (2, 2), rank 1 the other rows of t. An engine on rank 1 receives both,
    in bfloat16 and in chunks of 16 bytes:

        chunk 0    t    rank 0 sends rows 0:2, 8 bytes; rank 1 copies rows 2:4 from its memory
        chunk 1    u    rank 0 sends 8 bytes
        on rank 1    lower_bounds == {1: 16}, staging_bytes == 272, with the 256 of the places of tensors
    """

    target: ShardMap
    chunks: Sequence[Chunk]
    lower_bounds: Mapping[int, int]
    """The fewest bytes that each receiver can receive for which this rank plans."""

    @property
    def lower_bound(self) -> int:
        """The fewest bytes of all receivers for which this rank plans."""
        return sum(self.lower_bounds.values())

    @cached_property
    def staging_bytes(self) -> int:
        """Size of the largest chunk's memory on this rank: all have it, so that freed memory fits the next chunk."""
        return max((staging_bytes(chunk.shards, chunk.dtypes) for chunk in self.chunks), default=0)

    def values(self, runner: Runner, merges: bool = True) -> Iterator[ChunkValues]:
        """Yields the chunks with the values of a runner, adapters merged unless `merges` is false."""
        # All ranks have the same number of chunks, because encoding one is a collective: ranks agree on the scales of
        # blocks that they share. Later parameters can still be gathered while earlier ones are sent, but merged
        # adapters are read as a whole.
        parameters = runner.parameters(complete=runner.lora is not None)
        computed = runner.computed_parameters if merges else frozenset()
        served = runner.served_parameters() if computed else {}

        def wait_for(name: str) -> None:
            runner.wait_for([parameters[name]])

        for chunk in self.chunks:
            # Computed parameters are copies, which exist for one chunk at a time.
            needed = (chunk.encoder or chunk.schedule).source_parameters & computed
            tensors: Mapping[str, Tensor] = parameters | {name: served[name] for name in needed}
            if chunk.encoder:
                yield ChunkValues(chunk, chunk.encoder.run(tensors, wait_for))
            else:
                yield ChunkValues(chunk, tensors, wait_for)


@dataclass(frozen=True)
class ChunkValues:
    """A chunk, and the tensors from which this rank sends it."""

    chunk: Chunk
    tensors: Sources
    wait_for: Callable[[str], object] = lambda _: None
    """Waits for the values of a tensor by its name."""

    def send(self, target: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> Traffic:
        """Transfers all values; this rank's part of the target arrives in `target`."""
        return execute(self.chunk.schedule, self.tensors, target, group, self.wait_for)

    def send_changes(self, sent: SentValues, group: dist.ProcessGroup | None = None) -> tuple[Sequence[Patch], Traffic]:
        """Transfers what has changed since `sent`; returns the changes of this rank's part of the target."""
        return transfer_changes(self.chunk.schedule, self.tensors, sent, group, self.wait_for)

    def keep(self, sent: SentValues) -> None:
        """Copies the values, to find changes in the next transfer."""
        sent.keep_all(self.chunk.schedule, self.tensors)


def plan_transfer(
    source: ShardMap,
    target: ShardMap,
    dtype: torch.dtype,
    *,
    sized_by: Sequence[int] = (),
    receivers: Sequence[int] | None = None,
    keep_together: Iterable[Sequence[str]] = (),
    maps: EncodedMaps | None = None,
    max_bytes: int | None = None,
    ranks_per_node: int | None = None,
) -> TransferPlan:
    """Plans a transfer; all ranks call it together.

    The ranks `sized_by` of the target decide how large chunks are, all where none is named. This rank plans for
    `receivers`, itself where None. `maps` have the encoded shards of source and target.
    """
    rank = dist.get_rank()
    receivers = (rank,) if receivers is None else receivers
    node = ranks_per_node or device.ranks_of_a_node(dist.get_world_size())
    moves, chunks = plan(maps.source if maps else source, target, node), []
    elements = (max_bytes or CHUNK_BYTES) // dtype.itemsize
    for part in split_into_chunks(target, sized_by or target.ranks, elements, keep_together):
        made = {
            member: schedule(moves, member, dtype, tensors=part.tensors) for member in dict.fromkeys([rank, *receivers])
        }
        encoder = Encoder(maps.source, part.tensors, made[rank], dtype) if maps else None
        shards = part.shards(rank)
        dtypes = wire_dtypes(shards, part.tensors, dtype)
        received = {member: made[member] for member in receivers}
        chunks.append(Chunk(part.tensors, made[rank], encoder, shards, dtypes, received))
    return TransferPlan(target, chunks, {member: moves.lower_bound(member, dtype.itemsize) for member in receivers})


def plan_to_engines(
    runner: Runner,
    table: ModelTable,
    placements: Sequence[EnginePlacement],
    wire: Wire = "cast",
    *,
    receivers: Sequence[int] | None = None,
    max_bytes: int | None = None,
    ranks_per_node: int | None = None,
) -> TransferPlan:
    """Plans a transfer into engines of several layouts, each placement of one; all ranks call it together."""
    shards = [table.shard_map_engine(placement) for placement in placements]
    source, target = runner.shard_map(), shards[0] if len(shards) == 1 else JoinedShardMap(shards)
    encoding = encoding_of(wire)
    maps = encoded_maps(table, source, target, encoding) if encoding else None
    # Values and their scales are in one chunk.
    together = [(name, maps.target.scales_of(name)) for name in maps.target.encoded] if maps else ()
    # Engines of one layout are alike, so the ranks of the first one decide how large chunks are.
    first = [rank for at in placements for rank in at.ranks[: at.layout.ranks * at.stride : at.stride]]
    return plan_transfer(
        source, maps.target if maps else target, runner.dtype, sized_by=first, receivers=receivers,
        keep_together=together, maps=maps, max_bytes=max_bytes, ranks_per_node=ranks_per_node,
    )  # fmt: skip


def wire_dtypes(
    shards: Mapping[str, Shard], tensors: Mapping[str, TensorInfo], dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Returns the dtypes in which parameters travel; `dtype`: that of weights that are not quantized, and of zeros."""
    # No rank sends padding, but an engine gets its zeros: a bias that only the first rank adds is padding on others.
    return {
        name: tensors[shard.pieces[0].tensor].wire_dtype(dtype) if shard.pieces else dtype
        for name, shard in shards.items()
    }


def fitting_chunk_bytes(free: Sequence[int | None]) -> int:
    """Returns the size of chunks of which two fit each device, from its free bytes, None on the CPU."""
    # CHUNK_BYTES, or half of it as often as needed: 4 GiB free leave 3 for chunks of 1 GiB; 2 GiB leave 1 for chunks of
    # 512 MiB.
    usable = [size - KEPT_FREE_BYTES for size in free if size is not None]
    chunk = CHUNK_BYTES
    while usable and 2 * chunk > min(usable) and chunk > MIN_CHUNK_BYTES:
        chunk //= 2
    return chunk


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
    # GPU: packing and waiting have no metrics: the host only launches them.
    # GPU-TEST: tests/weight_sync/test_transfer_plan.py
    # GPU-RAN: h200-1, h100-1
    if not torch.cuda.is_available():  # on a GPU the host only launches packing and transfers
        times["time/weight_sync_packing"] = sum(part.seconds_packing for part in traffic)
        times["time/weight_sync_waiting"] = sum(part.seconds_waiting for part in traffic)
    return sum_over_ranks([moved]) | times
