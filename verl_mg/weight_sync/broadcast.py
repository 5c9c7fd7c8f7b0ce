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
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache, partial
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.distributed.outside_group import join_outside_group
from verl_mg.engines.engine import EngineDiedError
from verl_mg.layout import EngineLayout
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.shard_map import ExplicitShardMap
from verl_mg.training.runner import Runner
from verl_mg.weight_sync.servers import SENDER, Engines, Meeting, Servers, SyncResult, all_lost, no_connection
from verl_mg.weight_sync.transfer_plan import Chunk, SourceWeights, TransferPlan, plan_transfer, transfer_metrics

BUFFER_BYTES = 2**29
"""Bytes of weights that the sender and every rank of a server have in addition to their own, or one larger tensor."""
JOIN_TIMEOUT = timedelta(minutes=10)
"""Longest wait for the servers to join the process group."""

log = logging.getLogger(__name__)


class BroadcastSync:
    """Transfer chunk by chunk: one rank gathers whole tensors and broadcasts them to all ranks of all servers."""

    # The process group is created at the first transfer, and again when other servers take part in one.

    def __init__(self) -> None:
        self._meeting: Meeting | None = None
        self._group: dist.ProcessGroup | None = None  # on the sending rank
        self._planned = cache(_plan)
        self._lost: set[int] = set()
        """Servers of this rank that were lost in the current transfer."""

    def transfer(self, weights: SourceWeights, engines: Engines, servers: Servers) -> SyncResult:
        """Implements `ServerTransport.transfer`."""
        started, sending = time.perf_counter(), 0.0
        mine = {view.number: engines[view.number] for view in servers if view.number in engines}
        self._lost = set()
        self._ensure_group(engines, servers)
        plan = self._planned(weights.runner)
        for number, engine in mine.items():
            self._wait(number, engine.begin_update)
        chunks = [_tensors_of(chunk, weights.runner.dtype) for chunk in plan.chunks]
        sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in chunks]
        buffer = None
        if dist.get_rank() == SENDER:
            buffer = torch.empty(max(sizes), dtype=torch.uint8, device=device.current_device())
        traffic = []
        for place, values in enumerate(plan.values(weights.runner)):
            flat = None if buffer is None else buffer[: sizes[place]]
            traffic.append(values.send({} if flat is None else _views(chunks[place], flat)))
            received = time.perf_counter()
            self._broadcast(mine, chunks[place], flat, weights.version if place == len(chunks) - 1 else None)
            sending += time.perf_counter() - received
        for number, engine in mine.items():
            self._wait(number, partial(engine.end_update, weights.version))
        lost = all_lost(self._lost)
        if lost:
            self._leave(engines)
        metrics = transfer_metrics(traffic, plan.lower_bound, started)
        metrics["weight_sync/bytes_received"] += sum(sizes) * sum(view.ranks for view in servers)
        metrics["weight_sync/bytes_lower_bound"] += sum(sizes) * len(servers)  # each server needs the model once
        return SyncResult(metrics | {"time/weight_sync_sending": sending}, lost)

    def _broadcast(
        self,
        engines: Engines,
        tensors: Sequence[_WholeTensor],
        flat: Tensor | None,
        version: int | None,
    ) -> None:
        """Broadcasts a chunk, unless a server was lost; `version` is given with the last chunk."""
        # All ranks see the loss together, so no server hangs.
        if any(all_gather_json(bool(self._lost))):
            return
        assert self._meeting
        names, shapes = [tensor.name for tensor in tensors], [tensor.shape for tensor in tensors]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        receiving = {
            number: engine.receive(self._meeting.name, names, dtypes, shapes, version)
            for number, engine in engines.items()
        }
        sending = start_broadcast(self._group, flat) if self._group and flat is not None else None
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

    # -- the process group

    def _ensure_group(self, engines: Engines, servers: Servers) -> None:
        """Creates a group of the sender and the ranks of `servers` unless it exists since their last start."""
        if self._meeting and self._meeting.is_of(servers):
            return
        self._leave(engines)
        total = 1 + sum(view.ranks for view in servers)
        meeting = Meeting.arrange(servers, JOIN_TIMEOUT)
        # Requested before the sender joins, since joining waits for all members.
        joining, first = {}, 1
        for view in servers:
            if view.number in engines:
                where = meeting.name, meeting.address, meeting.port
                joining[view.number] = engines[view.number].join_group(*where, first, total, meeting.backend)
            first += view.ranks
        if meeting.rendezvous:
            members = range(total)
            self._group = join_outside_group(
                meeting.rendezvous.store, meeting.name, SENDER, members, meeting.backend, JOIN_TIMEOUT
            )
        for number, future in joining.items():
            self._wait(number, partial(engines[number].wait, future))
        self._meeting = meeting

    def _leave(self, engines: Engines) -> None:
        """Leaves the group on both sides, as a collective; errors of a server that is gone do not matter."""
        if not self._meeting:
            return
        # Requested before this side leaves and waited for afterwards: each side waits for the other one.
        members = {number for number, _ in self._meeting.members}
        leaving = [engine.leave_group(self._meeting.name) for number, engine in engines.items() if number in members]
        if self._group:
            dist.destroy_process_group(self._group)
        for future in leaving:
            future.exception()
        self._group, self._meeting = None, None


class _WholeTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def _plan(runner: Runner) -> TransferPlan:
    table = runner.table
    whole = ExplicitShardMap({SENDER: table.huggingface()}, table.tensor_index.tensors)
    return plan_transfer(
        runner.shard_map(), whole, runner.dtype, keep_together=_fused_tensors(table), max_bytes=BUFFER_BYTES
    )


def _tensors_of(chunk: Chunk, dtype: torch.dtype) -> list[_WholeTensor]:
    """Returns the tensors of a chunk in the order of the bytes that are sent."""
    # The widest first: each tensor starts at a multiple of its item size, as SGLang requires.
    infos = sorted(chunk.tensors.items(), key=lambda item: -item[1].wire_dtype(dtype).itemsize)
    return [_WholeTensor(name, info.shape, info.wire_dtype(dtype)) for name, info in infos]


def _views(tensors: Sequence[_WholeTensor], flat: Tensor) -> dict[str, Tensor]:
    """Returns the tensors as views of `flat` (bytes,) uint8."""
    parts = zip(tensors, flat.split([tensor.nbytes for tensor in tensors]), strict=True)
    return {tensor.name: part.view(tensor.dtype).view(tensor.shape) for tensor, part in parts}


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


def start_broadcast(group: dist.ProcessGroup, flat: Tensor) -> dist.Work:
    """Starts a broadcast to all others, which receive as large a tensor; UserError if NCCL cannot connect them."""
    try:
        return group.broadcast(flat, 0)
    except dist.DistBackendError as error:
        raise no_connection(error) from None
