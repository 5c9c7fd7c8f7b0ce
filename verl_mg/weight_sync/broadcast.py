"""Weight sync by broadcast to SGLang servers outside the job that were started without a loader of ours.

    ranks of the job    send boxes of a chunk to rank 0, which then has whole tensors
    leaders             request each server to receive the chunk, and wait for a refusal or the end
    rank 0              broadcasts the chunk over a process group of itself and all ranks of all servers
    ranks of servers    receive whole tensors, and load them as from a checkpoint

The price of needing no loader: every rank of a server receives the whole model, in the format of a checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore

from verl_mg import device
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.distributed.outside_group import Rendezvous, join_outside_group, local_address
from verl_mg.engines.engine import EngineDiedError
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.reshard import Schedule, execute, plan, schedule, split_into_chunks
from verl_mg.reshard.chunking import TensorChunk
from verl_mg.servers.remote_engine import RemoteEngine
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.shard_map import ExplicitShardMap
from verl_mg.weight_sync.engines import source_tensors, sources_of, transfer_metrics
from verl_mg.weight_sync.policy import Policy
from verl_mg.weight_sync.remote import SENDER, ServerView, SyncResult

CHUNK_BYTES = 2**29
"""Bytes of weights that the sender and every rank of a server have in addition to their own, or one larger tensor."""
JOIN_TIMEOUT = timedelta(minutes=10)
"""Longest wait for the servers to join the process group."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Chunk:
    """A part of the weights that is transferred at a time; its tensors are in the order of the bytes that are sent."""

    schedule: Schedule
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]

    @property
    def nbytes(self) -> int:
        return sum(prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items())

    def views(self, flat: Tensor | None) -> dict[str, Tensor]:
        """Returns the tensors as views of `flat` (nbytes,) uint8; {} on a rank without."""
        if flat is None:
            return {}
        sizes = [prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items()]
        parts = zip(self.shapes.items(), flat.split(sizes), strict=True)
        return {name: part.view(self.dtypes[name]).view(shape) for (name, shape), part in parts}


class BroadcastSync:
    """Transfer chunk by chunk: one rank gathers whole tensors and broadcasts them to all ranks of all servers."""

    # The process group is created at the first transfer, and again when other servers take part in one.

    def __init__(self) -> None:
        self._group: _RemoteProcessGroup | None = None  # on the sending rank
        self._group_name = ""
        self._members: list[tuple[int, str]] = []
        self._planned = cache(self._plan)
        self._lost: set[int] = set()
        """Servers of this rank that were lost in the current transfer."""

    def transfer(self, actor: Policy, engines: Mapping[int, RemoteEngine], servers: Sequence[ServerView]) -> SyncResult:
        """Transfers the actor's weights to some servers."""
        started = time.perf_counter()
        mine = {view.number: engines[view.number] for view in servers if view.number in engines}
        self._lost = set()
        self._ensure_group(engines, servers)
        chunks, lower_bound = self._planned(actor)
        traffic, sending = [], 0.0
        parameters, wait_for = sources_of(actor.runner)
        for number, engine in mine.items():
            self._wait(number, engine.begin_update)
        buffer = self._allocate_buffer(chunks)
        for place, chunk in enumerate(chunks):
            flat = buffer[: chunk.nbytes] if buffer is not None else None
            tensors = chunk.views(flat)
            sources = source_tensors(chunk.schedule, actor.runner, parameters)
            traffic.append(execute(chunk.schedule, sources, tensors, wait_for=wait_for))
            received = time.perf_counter()
            self._broadcast(mine, chunk, flat, actor.num_updates if place == len(chunks) - 1 else None)
            sending += time.perf_counter() - received
        for number, engine in mine.items():
            self._wait(number, partial(engine.end_update, actor.num_updates))
        lost = frozenset(number for rank in all_gather_json(sorted(self._lost)) for number in rank)
        if lost:
            self._leave(engines)
        metrics = transfer_metrics(traffic, lower_bound, started)
        whole = sum(chunk.nbytes for chunk in chunks)
        metrics["weight_sync/bytes_received"] += whole * sum(view.ranks for view in servers)
        metrics["weight_sync/bytes_lower_bound"] += whole * len(servers)  # each server needs the model once
        return SyncResult(metrics | {"time/weight_sync_sending": sending}, lost)

    def _broadcast(
        self, engines: Mapping[int, RemoteEngine], chunk: _Chunk, flat: Tensor | None, version: int | None
    ) -> None:
        """Broadcasts a chunk, unless a server was lost; `version` is given with the last chunk."""
        # All ranks see the loss together, so no server hangs.
        if any(all_gather_json(bool(self._lost))):
            return
        dtypes = [str(dtype).removeprefix("torch.") for dtype in chunk.dtypes.values()]
        receiving = {
            number: engine.receive(self._group_name, chunk.shapes, dtypes, chunk.shapes.values(), version)
            for number, engine in engines.items()
        }
        sending = self._group.send(flat) if self._group and flat is not None else None
        # First the servers, which may refuse: then nothing would ever be sent.
        for number, future in receiving.items():
            self._wait(number, partial(engines[number].wait, future))
        if sending:
            sending.wait()

    def _wait(self, number: int, work: Callable[[], None]) -> None:
        """Does what a server takes part in, and remembers if it is lost."""
        try:
            work()
        except EngineDiedError as error:
            log.warning("rollout: %s", error)
            self._lost.add(number)

    def _allocate_buffer(self, chunks: Sequence[_Chunk]) -> Tensor | None:
        """Returns memory for one chunk at a time, on the sending rank."""
        if dist.get_rank() != SENDER:
            return None
        return torch.empty(max(chunk.nbytes for chunk in chunks), dtype=torch.uint8, device=device.current_device())

    # -- the process group

    def _ensure_group(self, engines: Mapping[int, RemoteEngine], servers: Sequence[ServerView]) -> None:
        """Creates a group of the sender and the ranks of `servers` unless it exists since their last start."""
        members = [(view.number, view.start) for view in servers]
        if members == self._members:
            return
        self._leave(engines)
        total = 1 + sum(view.ranks for view in servers)
        rendezvous = None
        if dist.get_rank() == SENDER:
            rendezvous = Rendezvous(local_address([view.url for view in servers]), JOIN_TIMEOUT)
        where = [rendezvous.name, rendezvous.address, rendezvous.port] if rendezvous else []
        name, address, port = all_gather_json(where)[SENDER]
        backend = "nccl" if device.current_device().type == "cuda" else "gloo"
        # Requested before the sender joins, since joining waits for all members.
        joining, first = {}, 1
        for view in servers:
            if view.number in engines:
                joining[view.number] = engines[view.number].join_group(name, address, port, first, total, backend)
            first += view.ranks
        if rendezvous:
            group = join_outside_group(rendezvous.store, name, SENDER, range(total), backend, JOIN_TIMEOUT)
            self._group = _RemoteProcessGroup(rendezvous.store, group)
        for number, future in joining.items():
            self._wait(number, partial(engines[number].wait, future))
        self._group_name, self._members = name, members

    def _leave(self, engines: Mapping[int, RemoteEngine]) -> None:
        """Leaves the group on both sides, as a collective; errors of a server that is gone do not matter."""
        # Requested before this side leaves and waited for afterwards: each side waits for the other one.
        members = {number for number, _ in self._members}
        leaving = [engine.leave_group(self._group_name) for number, engine in engines.items() if number in members]
        if self._group:
            self._group.close()
        for future in leaving:
            future.exception()
        self._group, self._members = None, []

    # -- the plan

    def _plan(self, actor: Policy) -> tuple[list[_Chunk], int]:
        """Returns chunks and the lower bound of bytes, once: layouts do not change between iterations."""
        rank, dtype, table = dist.get_rank(), actor.runner.dtype, actor.runner.table
        whole = ExplicitShardMap({SENDER: table.huggingface()}, table.tensor_index.tensors)
        node = device.ranks_of_a_node(dist.get_world_size())
        chunks, lower_bound = [], 0
        for chunk in split_into_chunks(whole, [SENDER], CHUNK_BYTES // dtype.itemsize, _fused_tensors(table)):
            moves = plan(actor.runner.shard_map(), chunk, node)
            lower_bound += moves.lower_bound(rank, dtype.itemsize)
            chunks.append(_to_chunk(chunk, schedule(moves, rank, dtype), dtype))
        return chunks, lower_bound


def _to_chunk(chunk: TensorChunk, messages: Schedule, dtype: torch.dtype) -> _Chunk:
    """Returns the chunk with float32 first: each tensor starts at a multiple of its item size, as SGLang requires."""
    infos = sorted(chunk.tensors.items(), key=lambda item: not item[1].float32)
    dtypes = {name: torch.float32 if info.float32 else dtype for name, info in infos}
    return _Chunk(messages, {name: info.shape for name, info in infos}, dtypes)


def _fused_tensors(table: ModelTable) -> Iterator[list[str]]:
    """Yields tensors that SGLang fuses into one parameter, for some loaders need all in one call; experts do not."""
    # Where it is not known which ones it fuses, all of a layer are together.
    if not table.has_engine_rules:
        layers: dict[int | None, list[str]] = defaultdict(list)
        for name, entry in table.tensor_index.entries.items():
            if entry.layer is not None and not entry.of_experts:
                layers[entry.layer].append(name)
        yield from layers.values()
        return
    for shard in table.engine_shards(EngineLayout(), 0).values():
        names = [piece.tensor for piece in shard.pieces]
        if all(table.tensor_index.entries[name].expert is None for name in names):
            yield names


class _RemoteProcessGroup:
    """The process group of the sender and the servers' ranks, on the sender, with its store."""

    def __init__(self, store: TCPStore, group: dist.ProcessGroup) -> None:
        self._store, self._group = store, group

    def send(self, flat: Tensor) -> dist.Work:
        """Starts a broadcast to all others, which receive as large a tensor; UserError if NCCL cannot connect them."""
        try:
            return self._group.broadcast(flat, 0)
        except dist.DistBackendError as error:
            raise no_connection(error) from None

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def no_connection(error: Exception) -> UserError:
    """Returns the error for a job and servers that NCCL cannot connect."""
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return UserError(
        f"rollout.weight_transfer=process_group: NCCL {version} cannot connect the job and the servers "
        f"({error}). Start them with one version of NCCL and one value of NCCL_CUMEM_ENABLE, or write "
        "rollout.weight_transfer=disk."
    )
