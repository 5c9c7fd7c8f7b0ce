"""Weight sync from the actor to SGLang servers outside the job: through a shared folder, or a process group."""

from __future__ import annotations

import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore, distributed_c10d

from verl_mg import device
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.reshard import Schedule, execute, plan, schedule, split_into_chunks
from verl_mg.reshard.chunking import TensorChunk
from verl_mg.roles.models import Actor
from verl_mg.roles.weight_sync import WeightSync, source_tensors, sources_of, transfer_metrics
from verl_mg.rollout.sglang.remote_engine import RemoteEngine
from verl_mg.sharding.shard_map import ExplicitShardMap
from verl_mg.sharding.weight_table import WeightTable

CHUNK_BYTES = 2**29
"""Bytes of weights that the sender and every rank of a server have in addition to their own, or one larger tensor."""
SENDER = 0
"""Rank of the job that is a member of the process group."""
JOIN_TIMEOUT = timedelta(minutes=10)
"""Longest wait for the servers to join the process group."""


class RemoteWeightSync(WeightSync, Protocol):
    """Transfer of weights to servers; all ranks call it together."""

    def transfer_to_engine(self, actor: Actor, engine: int) -> None:
        """Transfers the weights to a server that was restarted; the others continue to generate.

        Args:
            actor: has the weights.
            engine: number of the server.
        """
        ...


class SharedFolderSync:
    """Transfer through a Hugging Face directory that all ranks write their parts of, and that the servers then load."""

    def __init__(self, engine: RemoteEngine | None, server: int, folder: Path, model_dir: Path) -> None:
        """Creates the sync.

        Args:
            engine: on the rank that leads a server, else None.
            server: number of that server.
            folder: of this job alone; directories of older versions in it are removed.
            model_dir: directory of the initial model, for config and tokenizer.
        """
        self._engine, self._server, self._folder, self._model_dir = engine, server, folder.resolve(), model_dir

    def transfer(self, actor: Actor) -> dict[str, float]:
        """Writes the actor's weights and has all servers load them."""
        started = time.perf_counter()
        weights = self._weights_dir(actor)
        actor.save(weights, self._model_dir)
        saved = time.perf_counter()
        if self._engine:
            self._engine.wait_until_up()
            self._engine.load_folder(weights, actor.num_updates)
        dist.barrier()
        if dist.get_rank() == SENDER:
            for old in set(self._folder.glob("weights-*")) - {weights}:
                shutil.rmtree(old)
        now = time.perf_counter()
        return {
            "time/weight_sync": now - started,
            "time/weight_sync_writing": saved - started,
            "time/weight_sync_loading": now - saved,
        }

    def transfer_to_engine(self, actor: Actor, engine: int) -> None:
        """Has one server load the directory that was written for all."""
        if self._engine and engine == self._server:
            self._engine.load_folder(self._weights_dir(actor), actor.num_updates)

    def _weights_dir(self, actor: Actor) -> Path:
        return self._folder / f"weights-{actor.num_updates}"


@dataclass(frozen=True)
class _Chunk:
    """A part of the weights that is transferred at a time; its tensors are in the order of the bytes that are sent."""

    schedule: Schedule
    """Messages of this rank."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each tensor."""
    dtypes: Mapping[str, torch.dtype]
    """Type of each tensor."""

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


class ProcessGroupSync:
    """Transfer chunk by chunk: one rank gathers whole tensors and broadcasts them to all ranks of all servers.

    The process group is created at the first transfer, and again when one of its servers was restarted.
    """

    def __init__(self, engine: RemoteEngine | None, server: int, leaders: Sequence[int], urls: Sequence[str]) -> None:
        """Creates the sync.

        Args:
            engine: on the rank that leads a server, else None.
            server: number of that server.
            leaders: the rank that leads each server.
            urls: of the servers.
        """
        self._engine, self._server, self._leaders, self._urls = engine, server, leaders, urls
        self._group: _RemoteProcessGroup | None = None  # on the sending rank
        self._group_name = ""
        self._members: dict[int, str] = {}
        self._planned = cache(self._plan)

    def transfer(self, actor: Actor) -> dict[str, float]:
        """Transfers the actor's weights to all servers."""
        return self._transfer(actor, range(len(self._leaders)))

    def transfer_to_engine(self, actor: Actor, engine: int) -> None:
        """Transfers the weights to one server, in a process group without the others."""
        self._transfer(actor, [engine])

    def _transfer(self, actor: Actor, servers: Sequence[int]) -> dict[str, float]:
        started = time.perf_counter()
        engine = self._engine if self._server in servers else None
        self._ensure_group(engine, servers)
        chunks, lower_bound = self._planned(actor)
        traffic, sending = [], 0.0
        parameters, wait_for = sources_of(actor.runner)
        if engine:
            engine.begin_update()
        buffer = self._allocate_buffer(chunks)
        for number, chunk in enumerate(chunks):
            flat = buffer[: chunk.nbytes] if buffer is not None else None
            tensors = chunk.views(flat)
            sources = source_tensors(chunk.schedule, actor.runner, parameters)
            traffic.append(execute(chunk.schedule, sources, tensors, wait_for=wait_for))
            received = time.perf_counter()
            self._broadcast(engine, chunk, flat, actor.num_updates if number == len(chunks) - 1 else None)
            sending += time.perf_counter() - received
        if engine:
            engine.end_update(actor.num_updates)
        return transfer_metrics(traffic, lower_bound, started) | {"time/weight_sync_sending": sending}

    def _broadcast(self, engine: RemoteEngine | None, chunk: _Chunk, flat: Tensor | None, version: int | None) -> None:
        dtypes = [str(dtype).removeprefix("torch.") for dtype in chunk.dtypes.values()]
        receiving = engine and engine.receive(self._group_name, chunk.shapes, dtypes, chunk.shapes.values(), version)
        sending = self._group.send(flat) if self._group and flat is not None else None
        # First the server, which may refuse: then nothing would ever be sent.
        if engine and receiving:
            engine.wait(receiving)
        if sending:
            sending.wait()

    def _allocate_buffer(self, chunks: Sequence[_Chunk]) -> Tensor | None:
        """Returns memory for one chunk at a time, on the sending rank."""
        if dist.get_rank() != SENDER:
            return None
        return torch.empty(max(chunk.nbytes for chunk in chunks), dtype=torch.uint8, device=device.current_device())

    # -- the process group

    def _ensure_group(self, engine: RemoteEngine | None, servers: Sequence[int]) -> None:
        """Creates a group of the sender and the ranks of `servers` unless it exists since their last start."""
        reports = all_gather_json({"start": engine.wait_until_up(), "ranks": engine.info.tp} if engine else None)
        members = {server: reports[self._leaders[server]]["start"] for server in servers}
        if members == self._members:
            return
        self._leave()
        ranks = [reports[self._leaders[server]]["ranks"] for server in servers]
        rendezvous = _GroupRendezvous(_local_address(self._urls)) if dist.get_rank() == SENDER else None
        where = [rendezvous.name, rendezvous.address, rendezvous.port] if rendezvous else []
        name, address, port = all_gather_json(where)[SENDER]
        joining, backend = None, "nccl" if device.current_device().type == "cuda" else "gloo"
        if engine:
            first = 1 + sum(ranks[: list(servers).index(self._server)])
            joining = engine.join_group(name, address, port, first, 1 + sum(ranks), backend)
        if rendezvous:
            self._group = rendezvous.join(1 + sum(ranks), backend)
        if engine and joining:
            engine.wait(joining)
        self._group_name, self._members = name, members

    def _leave(self) -> None:
        """Leaves the group on both sides at once, as a collective; errors of a server that is gone do not matter."""
        is_member = self._server in self._members
        leaving = self._engine.leave_group(self._group_name) if self._engine and is_member else None
        if self._group:
            self._group.close()
        if leaving:
            leaving.exception()
        self._group, self._members = None, {}

    # -- the plan

    def _plan(self, actor: Actor) -> tuple[list[_Chunk], int]:
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


def _fused_tensors(table: WeightTable) -> Iterator[list[str]]:
    """Yields tensors that SGLang fuses into one parameter, for some loaders need all in one call; experts do not."""
    for shard in table.sglang(EngineLayout(), 0).values():
        names = [piece.tensor for piece in shard.pieces]
        if all(table.tensor_index.entries[name].expert is None for name in names):
            yield names


class _GroupRendezvous:
    """A store on this rank, at a free port, in which the members of a new process group meet."""

    def __init__(self, address: str) -> None:
        self.address, self.name = address, f"verl_mg-{uuid.uuid4().hex}"
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=JOIN_TIMEOUT)
        self.port = self._store.port

    def join(self, ranks: int, backend: str) -> _RemoteProcessGroup:
        """Joins as rank 0 of `ranks`; returns when the others have joined."""
        # As SGLang's `init_custom_process_group` does it on the other side; `new_group` takes only ranks of the job.
        group: Any
        group, _ = distributed_c10d._new_process_group_helper(
            ranks,
            0,
            [],
            distributed_c10d.Backend(backend),
            PrefixStore(self.name, self._store),
            group_name=distributed_c10d.GroupName(self.name),
            timeout=JOIN_TIMEOUT,
        )
        distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(ranks)}
        return _RemoteProcessGroup(self._store, group)


class _RemoteProcessGroup:
    """The process group of the sender and the servers' ranks, on the sender, with its store."""

    def __init__(self, store: TCPStore, group: dist.ProcessGroup) -> None:
        self._store, self._group = store, group

    def send(self, flat: Tensor) -> dist.Work:
        """Starts a broadcast to all others, which receive a tensor of the same size.

        Raises:
            UserError: NCCL cannot connect the job and the servers, which the first broadcast shows.
        """
        try:
            return self._group.broadcast(flat, 0)
        except dist.DistBackendError as error:
            version = ".".join(map(str, torch.cuda.nccl.version()))
            raise UserError(
                f"rollout.weight_transfer=process_group: NCCL {version} cannot connect the job and the servers "
                f"({error}). Start them with one version of NCCL and one value of NCCL_CUMEM_ENABLE, or write "
                "rollout.weight_transfer=disk."
            ) from None

    def close(self) -> None:
        """Destroys the process group."""
        dist.destroy_process_group(self._group)


def _local_address(urls: Sequence[str]) -> str:
    """Returns the address under which the servers reach this machine: loopback only if all URLs are.

    Raises:
        UserError: there is no route to a server.
    """
    addresses = [_interface_address(url) for url in urls]
    return next((address for address in addresses if not address.startswith("127.")), addresses[0])


def _interface_address(url: str) -> str:
    """Returns the address of the interface through which packets to the server leave; no packet is sent."""
    parts = urlsplit(url)
    try:
        resolved = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = resolved[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"{url}: the job's first rank finds no route to it ({error}), which rollout.weight_transfer=process_group "
            "needs. Write rollout.weight_transfer=disk, or an address that every machine knows."
        ) from None
