"""Weight sync from every rank of the job straight into the ranks of SGLang servers outside the job.

The ranks of the servers are further ranks of one plan, after the ranks of the job. Each rank of the job computes its
own schedule and the schedules of some ranks of servers, which it puts into a store; `rollout.sglang.shard_receiver`
executes them at the other end. Servers on one host count as a node, into which a byte is sent once.

    ranks of the job                              store of rank 0              ranks of servers
    schedules of servers' ranks               ──▶ schedules/RANK
    leaders: request to each server           ─────────────────────────────▶   read their schedule
    wait until all ranks have arrived         ◀── arrived/RANK             ◀── arrive, wait for "go"
    agree that all have, join the group       ──▶ go                       ──▶ join the group
    execute chunk by chunk                    ═══ process group ═══════════    execute, in place
    collect reports                           ◀── report/NUMBER/RANK       ◀── bytes or an error
    a failure anywhere                        ──▶ abort/NUMBER             ──▶ members abort the group

The group stays until servers come, go or restart.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed import TCPStore

from verl_mg import device
from verl_mg.distributed.collectives import all_gather_json, sum_over_ranks
from verl_mg.distributed.outside_group import (
    Rendezvous,
    all_true,
    connect_all,
    connect_store,
    join_outside_group,
    local_address,
)
from verl_mg.engines.sglang.shard_receiver import (
    ARRIVAL_POLL_SECONDS,
    GO_KEY,
    GROUP_SECONDS,
    AbortWatch,
    Report,
    ShardRequest,
    abort_key,
    arrival_key,
    report_key,
    schedule_key,
)
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.reshard import Schedule, execute, plan, schedule, split_into_chunks
from verl_mg.reshard.delta_transfer import SentValues, transfer_changes
from verl_mg.reshard.encode import Encoder, encoded_maps
from verl_mg.reshard.encoding import Wire, encoding_of
from verl_mg.reshard.schedule_json import pack_schedules
from verl_mg.servers.remote_engine import RemoteEngine
from verl_mg.sharding.boxes import Box
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.shard_map import JoinedShardMap, ShardMap
from verl_mg.weight_sync.broadcast import no_connection
from verl_mg.weight_sync.engines import SourceChunk, chunk_sources
from verl_mg.weight_sync.policy import Policy
from verl_mg.weight_sync.remote import SENDER, ServerView, SyncResult, wait_for_servers

CHUNK_BYTES = 2**30
"""Bytes that a rank of a server receives in one schedule: adapters are merged for one schedule at a time."""
TIMEOUT = timedelta(seconds=GROUP_SECONDS)
NUM_PLANS = 4
"""Plans that are kept: when servers come and go, the remaining ones are often the same as before."""

log = logging.getLogger(__name__)

Shape = tuple[tuple[int, str], ...]
"""(first rank, layout) of each server in a plan."""


@dataclass(frozen=True)
class _Planned:
    """A plan as this rank takes part in it."""

    chunks: Sequence[SourceChunk]
    packed: Mapping[int, bytes]
    """Schedules of some ranks of servers; all ranks of the job together have all of them."""
    padding: Mapping[int, Mapping[str, Sequence[Box]]]
    """Boxes of their parameters that are padding, which no rank sends."""
    dtypes: Mapping[int, Mapping[str, str]]
    """Dtypes of their parameters."""
    lower_bound: int
    """The fewest bytes that these ranks of servers can receive."""


@dataclass
class _Session:
    """A process group of the job and some servers, used until other servers take part."""

    members: list[tuple[int, str]]
    """Number and start of each server."""
    rendezvous: Rendezvous | None
    """On the rank that has the store."""
    store: TCPStore
    backend: str
    request: ShardRequest
    """Request to a server, without its first rank and the number of the transfer."""
    everyone: Sequence[int]
    """Ranks of the job and of all servers."""
    ranks: Mapping[int, range]
    planned: _Planned
    group: dist.ProcessGroup | None = None
    """The group, once all have joined."""
    num_transfers: int = 0
    sent: list[SentValues] = field(default_factory=list)
    """Copies of the values that this rank has sent, for each chunk; empty without `rollout.delta`."""
    holds: Policy | None = None
    """The actor whose copied weights all servers have."""

    def request_to(self, server: int) -> ShardRequest:
        """Returns the request to a server in the current transfer."""
        where = self.request
        return ShardRequest(
            address=where.address, port=where.port, group=where.group,
            first_rank=self.ranks[server].start, number=self.num_transfers, changes=where.changes,
        )  # fmt: skip


class ShardSync:
    """Transfer in which each rank of a server receives its own shards, each box from a rank of the job that has it."""

    # With `delta` only elements are sent that have changed since the last transfer to the same servers.

    def __init__(self, table: ModelTable, wire: Wire = "cast", delta: bool = False) -> None:
        self._table, self._encoding, self._delta = table, encoding_of(wire), delta
        self._session: _Session | None = None
        self._planned = lru_cache(NUM_PLANS)(self._plan)

    def transfer(self, actor: Policy, engines: Mapping[int, RemoteEngine], servers: Sequence[ServerView]) -> SyncResult:
        """Transfers the actor's weights to some servers; UserError if a running server has not received its shards."""
        started = time.perf_counter()
        session = self._open(actor, servers)
        session.num_transfers += 1
        session.request = replace(session.request, changes=self._delta and session.holds is actor)
        session.holds = None  # until the transfer has succeeded
        updates = {
            view: engines[view.number].update_shards(session.request_to(view.number), actor.num_updates)
            for view in servers
            if view.number in engines
        }
        # A server that refuses or dies sends nothing more, and others would wait for it in the group.
        for update in updates.values():
            update.add_done_callback(lambda done: _abort_after_failure(session, done))
        error, moved = "", {"weight_sync/bytes_sent": 0}
        try:
            if self._join(session, updates):
                moved["weight_sync/bytes_sent"] = self._send(session, actor)
        except (RuntimeError, UserError) as failure:
            error = f"{type(failure).__name__}: {failure}"
            _abort(session)
        reports, problems, lost = self._collect(session, updates)
        moved["weight_sync/bytes_sent"] += sum(report.bytes_sent for report in reports)
        moved["weight_sync/bytes_received"] = sum(report.bytes_received for report in reports)
        moved["weight_sync/bytes_lower_bound"] = session.planned.lower_bound
        outcome = all_gather_json({"error": error, "problems": problems, "lost": lost})
        all_lost = frozenset(number for rank in outcome for number in rank["lost"])
        refused = [text for rank in outcome for text in rank["problems"]]
        broken = [rank["error"] for rank in outcome if rank["error"]]
        if all_lost or refused or broken:
            self._close()  # a group with a missing member cannot be used again
        if not all_lost and (refused or broken):
            raise UserError(
                "rollout.weight_transfer=shards: the servers have not received the weights "
                f"({(refused or broken)[0]}). See the servers' logs, or write rollout.weight_transfer=broadcast."
            )
        if not all_lost:
            session.holds = actor
            for view in updates:
                engines[view.number].confirm(actor.num_updates)
        seconds = {"time/weight_sync": time.perf_counter() - started}
        return SyncResult(sum_over_ranks([moved]) | seconds, all_lost)

    # -- one transfer

    def _join(self, session: _Session, updates: Mapping[ServerView, Future[None]]) -> bool:
        """Creates the group, unless it exists; False if a server did not get as far as joining it."""
        if session.group is not None:
            return True
        # Joining waits for all members, so every rank of every server must have arrived first.
        arrived = all([_has_arrived(session, view.number, update) for view, update in updates.items()])
        if not all(all_gather_json(arrived)):
            _abort(session)
            return False
        session.store.set(GO_KEY, "")
        session.group = join_outside_group(
            session.store, session.request.group, dist.get_rank(), session.everyone, session.backend, TIMEOUT
        )
        try:
            connect_all(session.group, device.current_device())
        except dist.DistBackendError as error:
            if session.backend == "nccl":
                raise no_connection(error) from None
            raise
        return True

    def _send(self, session: _Session, actor: Policy) -> int:
        """Sends the boxes of this rank; returns their bytes."""
        group, sent = session.group, 0
        assert group is not None
        with AbortWatch(session.store, session.num_transfers, group):
            if session.request.changes:
                for number, (chunk, tensors, wait_for) in enumerate(chunk_sources(actor, session.planned.chunks)):
                    copies = session.sent[number]
                    sent += transfer_changes(chunk.schedule, tensors, copies, group, wait_for)[1].bytes_sent
                if all_true(group, True, device.current_device()):
                    return sent
                log.warning("rollout: the weights of a server differ from those that were sent; all are sent again")
            session.sent = [SentValues() for _ in session.planned.chunks] if self._delta else []
            for number, (chunk, tensors, wait_for) in enumerate(chunk_sources(actor, session.planned.chunks)):
                sent += execute(chunk.schedule, tensors, {}, group, wait_for).bytes_sent
                if self._delta:
                    session.sent[number].keep(chunk.schedule, tensors)
        return sent

    def _collect(
        self, session: _Session, updates: Mapping[ServerView, Future[None]]
    ) -> tuple[list[Report], list[str], list[int]]:
        """Waits for this rank's servers; returns reports of their ranks, problems, and the servers that were lost."""
        reports: list[Report] = []
        done, problems, lost = wait_for_servers(updates)
        for view in done:
            for rank in session.ranks[view.number]:
                key = report_key(session.num_transfers, rank)
                report = Report.parse(session.store.get(key))
                session.store.delete_key(key)
                reports.append(report)
                if report.error:
                    problems.append(f"{view.url}: {report.error}")
        return reports, problems, lost

    # -- the group

    def _open(self, actor: Policy, servers: Sequence[ServerView]) -> _Session:
        """Returns the session of these servers: the last one, unless others took part or one was restarted."""
        members = [(view.number, view.start) for view in servers]
        if self._session and self._session.members == members:
            return self._session
        self._close()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        ranks = _place(servers, world_size, device.ranks_of_a_node(world_size))
        rendezvous = Rendezvous(local_address([view.url for view in servers]), TIMEOUT) if rank == SENDER else None
        where = [rendezvous.name, rendezvous.address, rendezvous.port] if rendezvous else []
        name, address, port = all_gather_json(where)[SENDER]
        store = rendezvous.store if rendezvous else connect_store(address, port, TIMEOUT)
        backend = "nccl" if device.current_device().type == "cuda" else "gloo"
        everyone = [*range(world_size), *(member for some in ranks.values() for member in some)]
        planned = self._planned(actor, tuple((ranks[view.number].start, view.layout) for view in servers))
        for member, packed in planned.packed.items():
            described = {
                "ranks": everyone, "backend": backend, "padding": planned.padding[member],
                "dtypes": planned.dtypes[member], "exact": self._delta or self._encoding is not None,
            }  # fmt: skip
            _set_bytes(store, schedule_key(member), json.dumps(described).encode() + b"\n" + packed)
        request = ShardRequest(address=address, port=port, group=name, first_rank=0, number=0)
        self._session = _Session(members, rendezvous, store, backend, request, everyone, ranks, planned)
        return self._session

    def _close(self) -> None:
        """Leaves the group; servers leave theirs when they are asked to join another one."""
        session, self._session = self._session, None
        if session and session.group:
            session.group.abort()  # NCCL would wait for servers that are gone
            dist.destroy_process_group(session.group)

    # -- the plan

    def _plan(self, actor: Policy, shape: Shape) -> _Planned:
        rank, world_size, dtype = dist.get_rank(), dist.get_world_size(), actor.runner.dtype
        target, first = self._target(shape)
        source = actor.runner.shard_map()
        maps = encoded_maps(self._table, source, target, self._encoding) if self._encoding else None
        target, together = (maps.target, maps.keep_together) if maps else (target, ())
        node = device.ranks_of_a_node(world_size)
        # Schedules are computed in the job, so that servers need no tables; its ranks share the work.
        receivers = target.ranks[rank::world_size]
        mine: list[SourceChunk] = []
        theirs: dict[int, list[Schedule]] = defaultdict(list)
        lower_bound = 0
        for chunk in split_into_chunks(target, first, CHUNK_BYTES // dtype.itemsize, together):
            part = maps.source.part(list(chunk.tensors)) if maps else None
            moves = plan(part or source, chunk, node)
            messages = schedule(moves, rank, dtype)
            mine.append(SourceChunk(schedule=messages, encoder=Encoder(part, messages, dtype) if part else None))
            for member in receivers:
                theirs[member].append(schedule(moves, member, dtype))
                lower_bound += moves.lower_bound(member, dtype.itemsize)
        padding = {
            member: {name: shard.padding for name, shard in target.shards(member).items() if shard.padding}
            for member in receivers
        }
        dtypes = {
            member: {
                name: str(target.tensors[shard.pieces[0].tensor].wire_dtype(dtype)).removeprefix("torch.")
                for name, shard in target.shards(member).items()
                if shard.pieces
            }
            for member in receivers
        }
        packed = {member: pack_schedules(parts) for member, parts in theirs.items()}
        return _Planned(mine, packed, padding, dtypes, lower_bound)

    def _target(self, shape: Shape) -> tuple[ShardMap, list[int]]:
        """Returns the shard map of all servers, and the ranks of the first server of each layout."""
        by_layout: dict[str, list[int]] = defaultdict(list)
        for start, layout in shape:
            by_layout[layout] += range(start, start + EngineLayout.parse(layout).ranks)
        placements = [EnginePlacement(EngineLayout.parse(text), tuple(ranks)) for text, ranks in by_layout.items()]
        maps = [self._table.shard_map_engine(placement) for placement in placements]
        first = [rank for placement in placements for rank in placement.ranks[: placement.layout.ranks]]
        return (maps[0] if len(maps) == 1 else JoinedShardMap(maps)), first


def _place(servers: Sequence[ServerView], world_size: int, node: int) -> dict[int, range]:
    """Returns the ranks of each server in the plan, after the ranks of the job; servers of one host begin a node."""
    # A job of 4 ranks, 8 ranks a node; servers 0 and 1 on host a and 2 on host b, of 2 ranks each, get the ranks 8-9,
    # 10-11 and 16-17. The numbers in between are unused.
    by_host: dict[str, list[ServerView]] = defaultdict(list)
    for view in servers:
        by_host[urlsplit(view.url).hostname or view.url].append(view)
    ranks, end = {}, world_size
    for views in by_host.values():
        end = -(-end // node) * node
        for view in views:
            ranks[view.number] = range(end, end + view.ranks)
            end += view.ranks
    return {view.number: ranks[view.number] for view in servers}


def _has_arrived(session: _Session, server: int, update: Future[None]) -> bool:
    """Waits until all ranks of a server are about to join the group; False if its update ends before."""
    # Polls both: a server that fails before it arrives sets no key.
    keys = [arrival_key(rank) for rank in session.ranks[server]]
    while not session.store.check(keys):
        if update.done():
            return False
        time.sleep(ARRIVAL_POLL_SECONDS)
    return True


def _abort_after_failure(session: _Session, update: Future[None]) -> None:
    if update.exception() is not None:
        _abort(session)


def _abort(session: _Session) -> None:
    """Announces to all members that the transfer cannot be completed."""
    session.store.set(abort_key(session.num_transfers), "")


def _set_bytes(store: TCPStore, key: str, value: bytes) -> None:
    store.set(key, value)  # type: ignore[arg-type]  # torch's annotation knows only text
