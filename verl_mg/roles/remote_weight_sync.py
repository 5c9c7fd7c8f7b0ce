"""The actor's weights on their way to SGLang servers: through a folder that both sides see, or a process group."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.layout import EngineLayout
from verl_mg.reshard import Schedule, execute, plan, schedule, split_into_chunks
from verl_mg.reshard.chunking import TensorChunk
from verl_mg.roles.models import Actor
from verl_mg.roles.remote_process_group import GroupRendezvous, RemoteProcessGroup, address_for
from verl_mg.roles.weight_sync import WeightSync, report, sources
from verl_mg.rollout.sglang.remote_engine import RemoteEngine
from verl_mg.sharding.shard_map import ExplicitShardMap
from verl_mg.sharding.weight_table import WeightTable

CHUNK_BYTES = 2**29
"""The sender and every rank of a server have so many bytes of weights beside their own; one tensor may be more."""
SENDER = 0


class RemoteWeightSync(WeightSync, Protocol):
    """Called by all ranks together."""

    def sync_one(self, actor: Actor, server: int) -> None:
        """Bring the weights to one server, which was started anew; the others go on with their samples."""
        ...


class SharedFolderSync:
    """Each rank writes its own boxes of a Hugging Face directory, which the servers then load.

    `engine` is that of server number `server`, on the rank that leads it. `folder` belongs to this job: what was
    written there for older versions is removed.
    """

    def __init__(self, engine: RemoteEngine | None, server: int, folder: Path, model_dir: Path) -> None:
        self._engine, self._server, self._folder, self._model_dir = engine, server, folder.resolve(), model_dir

    def sync(self, actor: Actor) -> dict[str, float]:
        """See `WeightSync`."""
        started = time.perf_counter()
        written = self._written(actor)
        actor.save(written, self._model_dir)
        saved = time.perf_counter()
        if self._engine:
            self._engine.wait_until_up()
            self._engine.load_folder(written, actor.num_updates)
        dist.barrier()
        if dist.get_rank() == SENDER:
            for old in set(self._folder.glob("weights-*")) - {written}:
                shutil.rmtree(old)
        now = time.perf_counter()
        return {"time/sync": now - started, "time/sync_writing": saved - started, "time/sync_loading": now - saved}

    def sync_one(self, actor: Actor, server: int) -> None:
        """See `RemoteWeightSync`; what was written for all is still there."""
        if self._engine and server == self._server:
            self._engine.load_folder(self._written(actor), actor.num_updates)

    def _written(self, actor: Actor) -> Path:
        return self._folder / f"weights-{actor.num_updates}"


@dataclass(frozen=True)
class _Part:
    """A portion: what this rank does for it, and its tensors in the order of the bytes that are sent."""

    schedule: Schedule
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]

    @property
    def nbytes(self) -> int:
        return sum(prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items())

    def views(self, flat: Tensor | None) -> dict[str, Tensor]:
        """The tensors, one behind the other in the bytes of `flat`; {} on a rank without."""
        if flat is None:
            return {}
        sizes = [prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items()]
        named = zip(self.shapes.items(), flat.split(sizes), strict=True)
        return {name: room.view(self.dtypes[name]).view(shape) for (name, shape), room in named}


class ProcessGroupSync:
    """Portion by portion, whole tensors come together on one rank, which broadcasts them to all ranks of all servers.

    `engine` is that of server number `server`, on the rank that leads it; `leaders`: the ranks that lead, by number.
    The group is made at the first sync, and anew when a server in it has been started anew.
    """

    def __init__(self, engine: RemoteEngine | None, server: int, leaders: Sequence[int], urls: Sequence[str]) -> None:
        self._engine, self._server, self._leaders, self._urls = engine, server, leaders, urls
        self._group: RemoteProcessGroup | None = None  # on the sending rank
        self._name = ""
        self._members: dict[int, str] = {}
        self._planned = cache(self._plan)

    def sync(self, actor: Actor) -> dict[str, float]:
        """See `WeightSync`."""
        return self._bring(actor, range(len(self._leaders)))

    def sync_one(self, actor: Actor, server: int) -> None:
        """See `RemoteWeightSync`."""
        self._bring(actor, [server])

    def _bring(self, actor: Actor, servers: Sequence[int]) -> dict[str, float]:
        started = time.perf_counter()
        engine = self._engine if self._server in servers else None
        self._meet(engine, servers)
        parts, lower_bound = self._planned(actor)
        traffic, sending, parameters = [], 0.0, actor.runner.parameters()
        if engine:
            engine.begin_update()
        flat = self._room(parts)
        for number, part in enumerate(parts):
            own = flat[: part.nbytes] if flat is not None else None
            tensors = part.views(own)
            traffic.append(execute(part.schedule, sources(part.schedule, actor.runner, parameters), tensors))
            arrived = time.perf_counter()
            self._hand_over(engine, part, own, actor.num_updates if number == len(parts) - 1 else None)
            sending += time.perf_counter() - arrived
        if engine:
            engine.end_update(actor.num_updates)
        return report(traffic, lower_bound, started) | {"time/sync_sending": sending}

    def _hand_over(self, engine: RemoteEngine | None, part: _Part, flat: Tensor | None, version: int | None) -> None:
        dtypes = [str(dtype).removeprefix("torch.") for dtype in part.dtypes.values()]
        taking = engine and engine.receive(self._name, part.shapes, dtypes, part.shapes.values(), version)
        sending = self._group.send(flat) if self._group and flat is not None else None
        # First the server, which may refuse: then nothing would ever be sent.
        if engine and taking:
            engine.wait(taking)
        if sending:
            sending.wait()

    def _room(self, parts: Sequence[_Part]) -> Tensor | None:
        """On the sending rank: for one portion after the other."""
        if dist.get_rank() != SENDER:
            return None
        return torch.empty(max(part.nbytes for part in parts), dtype=torch.uint8, device=device.current_device())

    # -- the group

    def _meet(self, engine: RemoteEngine | None, servers: Sequence[int]) -> None:
        """Have a group of the sender and the ranks of `servers`, as they were started last."""
        told = all_gather_json({"start": engine.wait_until_up(), "ranks": engine.info.tp} if engine else None)
        members = {server: told[self._leaders[server]]["start"] for server in servers}
        if members == self._members:
            return
        self._leave()
        ranks = [told[self._leaders[server]]["ranks"] for server in servers]
        meeting = GroupRendezvous(address_for(self._urls)) if dist.get_rank() == SENDER else None
        name, address, port = all_gather_json([meeting.name, meeting.address, meeting.port] if meeting else [])[SENDER]
        joining, backend = None, "nccl" if device.current_device().type == "cuda" else "gloo"
        if engine:
            first = 1 + sum(ranks[: list(servers).index(self._server)])
            joining = engine.join_group(name, address, port, first, 1 + sum(ranks), backend)
        if meeting:
            self._group = meeting.join(1 + sum(ranks), backend)
        if engine and joining:
            engine.wait(joining)
        self._name, self._members = name, members

    def _leave(self) -> None:
        """Both sides at once, as for a collective; what a server that is gone says of it is of no interest."""
        knows = self._server in self._members
        leaving = self._engine.leave_group(self._name) if self._engine and knows else None
        if self._group:
            self._group.close()
        if leaving:
            leaving.exception()
        self._group, self._members = None, {}

    # -- the plan

    def _plan(self, actor: Actor) -> tuple[list[_Part], int]:
        """Made once: layouts do not change between iterations."""
        rank, dtype, table = dist.get_rank(), actor.runner.dtype, actor.runner.table
        whole = ExplicitShardMap({SENDER: table.huggingface()}, table.tensor_index.tensors)
        node = device.ranks_of_a_node(dist.get_world_size())
        parts, lower_bound = [], 0
        for portion in split_into_chunks(whole, [SENDER], CHUNK_BYTES // dtype.itemsize, _loaded_together(table)):
            moves = plan(actor.runner.shard_map(), portion, node)
            lower_bound += moves.lower_bound(rank, dtype.itemsize)
            parts.append(_part(portion, schedule(moves, rank, dtype), dtype))
        return parts, lower_bound


def _part(portion: TensorChunk, own: Schedule, dtype: torch.dtype) -> _Part:
    """float32 first, so that each tensor stands at a multiple of its item's size, as SGLang asks for."""
    infos = sorted(portion.tensors.items(), key=lambda item: not item[1].float32)
    dtypes = {name: torch.float32 if info.float32 else dtype for name, info in infos}
    return _Part(own, {name: info.shape for name, info in infos}, dtypes)


def _loaded_together(table: WeightTable) -> Iterator[list[str]]:
    """Tensors that SGLang fuses into one parameter; some of its loaders want all of them in one call, experts' not."""
    fused = table.sglang(EngineLayout(), 0).values()
    for shard in fused:
        names = [piece.tensor for piece in shard.pieces]
        if all(table.tensor_index.entries[name].expert is None for name in names):
            yield names
