"""Weight sync from every rank of the job straight into the ranks of SGLang servers outside the job.

Servers that cannot receive shards receive broadcasts (`ProcessGroupSync`).

The ranks of the servers are further ranks of one plan, after the ranks of the job. Each rank of the job computes its
own schedule and the schedules of some ranks of servers, which it puts into a store; `engines.sglang.shard_receiver`
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
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed import TCPStore

from verl_mg import device
from verl_mg.distributed.collectives import all_gather_json, sum_over_ranks
from verl_mg.distributed.outside_group import all_true, connect_all, connect_store, join_outside_group
from verl_mg.engines.engine_options import EngineCase
from verl_mg.engines.kinds import SGLANG
from verl_mg.engines.sglang.shard_receiver import (
    ARRIVAL_POLL_SECONDS,
    GO_KEY,
    GROUP_SECONDS,
    RECEIVER,
    AbortWatch,
    Report,
    ShardRequest,
    Task,
    abort_key,
    arrival_key,
    report_key,
    schedule_key,
)
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.reshard.delta_transfer import SentValues
from verl_mg.reshard.encode import check_engine_blocks
from verl_mg.reshard.encoding import Wire, encoding_of
from verl_mg.sharding.model_table import ModelTable
from verl_mg.training.runner import Runner
from verl_mg.weight_sync.broadcast import BroadcastSync
from verl_mg.weight_sync.servers import (
    SENDER,
    Engines,
    Meeting,
    Servers,
    ServerView,
    SyncResult,
    no_connection,
    wait_for_servers,
)
from verl_mg.weight_sync.transfer_plan import SourceWeights, TransferPlan, plan_to_engines, wire_dtypes

TIMEOUT = timedelta(seconds=GROUP_SECONDS)
NUM_PLANS = 4
"""Plans that are kept: when servers come and go, the remaining ones are often the same as before."""

log = logging.getLogger(__name__)


class ProcessGroupSync:
    """Transfer over process groups, by the way that each server supports.

    `broadcast_to_all` broadcasts also to servers that could receive shards. Quantized weights (`wire`) and changes
    (`delta`) are sent only as shards.
    """

    def __init__(
        self, table: ModelTable, broadcast_to_all: bool = False, wire: Wire = "cast", delta: bool = False
    ) -> None:
        self._table, self._broadcast_to_all, self._wire = table, broadcast_to_all, wire
        self._shards_only = delta or wire != "cast"
        self._shards, self._broadcast = ShardSync(table, wire, delta), BroadcastSync()
        self._warned: set[str] = set()

    def transfer(self, weights: SourceWeights, engines: Engines, servers: Servers) -> SyncResult:
        """Implements `ServerTransport.transfer`; UserError if a server needs shards and cannot receive them."""
        obstacles = {view.number: self._obstacle(view) for view in servers}
        receiving = [view for view in servers if not obstacles[view.number]]
        others = [view for view in servers if obstacles[view.number]]
        if others and self._shards_only:
            raise UserError(
                f"{others[0].url}: {obstacles[others[0].number]}; with rollout.wire and rollout.delta servers receive "
                "only shards. Start it otherwise, or leave both out."
            )
        metrics: Counter[str] = Counter()
        lost: frozenset[int] = frozenset()
        if receiving:
            result = self._shards.transfer(weights, engines, receiving)
            if result.lost:  # the caller repeats the transfer without them
                return result
            metrics.update(result.metrics)
        if others:
            result = self._broadcast.transfer(weights, engines, others)
            lost = result.lost
            metrics.update(result.metrics)
            # Shards were configured, and a broadcast costs many times the bytes.
            if not self._broadcast_to_all and dist.get_rank() == SENDER:
                self._warn(others, obstacles, result.metrics)
        return SyncResult(dict(metrics), lost)

    def _obstacle(self, view: ServerView) -> str:
        """Returns why a server receives the whole model; empty where its ranks receive their shards."""
        if self._broadcast_to_all:
            return "rollout.weight_transfer=broadcast"
        return view.shard_obstacle or table_obstacle(self._table, EngineLayout.parse(view.layout), self._wire)

    def _warn(self, views: Sequence[ServerView], obstacles: Mapping[int, str], metrics: Mapping[str, float]) -> None:
        new = [view for view in views if view.url not in self._warned]
        self._warned |= {view.url for view in new}
        if new:
            received, needed = metrics["weight_sync/bytes_received"], metrics["weight_sync/bytes_lower_bound"]
            log.warning(
                "%s: %s. Each rank of %d servers receives the whole model through one rank: %.3g GB per update instead "
                "of about %.3g GB. Start servers with --custom-weight-loader %s where verl_mg can be imported.",
                new[0].url, obstacles[new[0].number], len(views), received / 1e9, needed / 1e9, RECEIVER,
            )  # fmt: skip


def table_obstacle(table: ModelTable, layout: EngineLayout, wire: Wire = "cast") -> str:
    """Returns why the shards of a server of some layout are not known; empty where they are."""
    try:
        SGLANG.check_layout(EngineCase(table, layout))
        if encoding := encoding_of(wire):
            shards = table.shard_map_engine(EnginePlacement(layout, tuple(range(layout.ranks))))
            check_engine_blocks(table, shards, encoding, shards.ranks)
    except UserError as error:
        return str(error).rstrip(".")
    return ""


@dataclass
class _Session:
    """A process group of the job and some servers, used until other servers take part."""

    meeting: Meeting
    store: TCPStore
    ranks: Mapping[int, range]
    """Ranks of each server."""
    plan: TransferPlan
    group: dist.ProcessGroup | None = None
    """The group, once all have joined."""
    number: int = 0
    """Number of the current transfer."""
    sent: list[SentValues] = field(default_factory=list)
    """Copies of the values that this rank has sent, for each chunk; empty without `rollout.delta`."""
    holds: Runner | None = None
    """The runner whose copied weights all servers have."""

    @property
    def everyone(self) -> list[int]:
        """Ranks of the job and of all servers."""
        return [*range(dist.get_world_size()), *(rank for ranks in self.ranks.values() for rank in ranks)]

    def has_arrived(self, server: int, update: Future[None]) -> bool:
        """Waits until all ranks of a server are about to join the group; False if its update ends before."""
        # Polls both: a server that fails before it arrives sets no key.
        keys = [arrival_key(rank) for rank in self.ranks[server]]
        while not self.store.check(keys):
            if update.done():
                return False
            time.sleep(ARRIVAL_POLL_SECONDS)
        return True

    def take_report(self, rank: int) -> Report:
        """Returns the report of a rank of a server about the current transfer."""
        key = report_key(self.number, rank)
        report = Report(**json.loads(self.store.get(key)))
        self.store.delete_key(key)
        return report

    def abort(self, after: Future[None] | None = None) -> None:
        """Announces to all members that the transfer cannot be completed; `after` an update, only if it has failed."""
        if after is None or after.exception() is not None:
            self.store.set(abort_key(self.number), "")


class ShardSync:
    """Transfer in which each rank of a server receives its own shards, each box from a rank of the job that has it."""

    # With `delta` only elements are sent that have changed since the last transfer to the same servers.

    def __init__(self, table: ModelTable, wire: Wire = "cast", delta: bool = False) -> None:
        self._table, self._wire, self._delta = table, wire, delta
        self._session: _Session | None = None
        self._planned = lru_cache(NUM_PLANS)(self._plan)

    def transfer(self, weights: SourceWeights, engines: Engines, servers: Servers) -> SyncResult:
        """Implements `ServerTransport.transfer`; UserError if a running server has not received its shards."""
        started = time.perf_counter()
        session = self._open(weights.runner, servers)
        session.number += 1
        changes = self._delta and session.holds is weights.runner
        session.holds = None  # until the transfer has succeeded
        meeting = session.meeting
        updates: dict[ServerView, Future[None]] = {}
        for view in servers:
            if view.number in engines:
                request = ShardRequest(
                    address=meeting.address, port=meeting.port, group=meeting.name,
                    first_rank=session.ranks[view.number].start, number=session.number, changes=changes,
                )  # fmt: skip
                updates[view] = engines[view.number].update_shards(request, weights.version)
                # A server that refuses or dies sends nothing more, and others would wait for it in the group.
                updates[view].add_done_callback(session.abort)
        error, sent = "", 0
        try:
            if self._join(session, updates):
                sent = self._send(session, weights.runner, changes)
        except (RuntimeError, UserError) as failure:
            error = f"{type(failure).__name__}: {failure}"
            session.abort()
        done, problems, lost = wait_for_servers(updates)
        reports = {rank: session.take_report(rank) for view in done for rank in session.ranks[view.number]}
        problems += [
            f"{view.url}: {text}" for view in done for rank in session.ranks[view.number]
            if (text := reports[rank].error)
        ]  # fmt: skip
        moved = {
            "weight_sync/bytes_sent": sent + sum(report.bytes_sent for report in reports.values()),
            "weight_sync/bytes_received": sum(report.bytes_received for report in reports.values()),
            "weight_sync/bytes_lower_bound": session.plan.lower_bound,
        }
        outcome = all_gather_json({"failures": problems, "error": error, "lost": lost})
        all_lost = frozenset(number for rank in outcome for number in rank["lost"])
        refused = [text for rank in outcome for text in rank["failures"]]
        failures = refused + [rank["error"] for rank in outcome if rank["error"]]
        if all_lost or failures:
            self._close()  # a group with a missing member cannot be used again
        if failures and not all_lost:
            raise UserError(
                f"rollout.weight_transfer=shards: the servers have not received the weights ({failures[0]}). See the "
                "servers' logs, or write rollout.weight_transfer=broadcast."
            )
        if not all_lost:
            session.holds = weights.runner
            for view in updates:
                engines[view.number].confirm(weights.version)
        seconds = {"time/weight_sync": time.perf_counter() - started}
        return SyncResult(sum_over_ranks([moved]) | seconds, all_lost)

    # -- one transfer

    def _join(self, session: _Session, updates: Mapping[ServerView, Future[None]]) -> bool:
        """Creates the group, unless it exists; False if a server did not get as far as joining it."""
        if session.group is not None:
            return True
        # Joining waits for all members, so every rank of every server must have arrived first.
        arrived = all([session.has_arrived(view.number, update) for view, update in updates.items()])
        if not all(all_gather_json(arrived)):
            session.abort()
            return False
        session.store.set(GO_KEY, "")
        meeting = session.meeting
        session.group = join_outside_group(
            session.store, meeting.name, dist.get_rank(), session.everyone, meeting.backend, TIMEOUT
        )
        try:
            connect_all(session.group, device.current_device())
        except dist.DistBackendError as error:
            if meeting.backend == "nccl":
                raise no_connection(error) from None
            raise
        return True

    def _send(self, session: _Session, runner: Runner, changes: bool) -> int:
        """Sends the boxes of this rank; returns their bytes."""
        group, sent, plan = session.group, 0, session.plan
        assert group is not None
        with AbortWatch(session.store, session.number, group):
            if changes:
                for values, copies in zip(plan.values(runner), session.sent, strict=True):
                    sent += values.send_changes(copies, group)[1].bytes_sent
                if all_true(group, True, device.current_device()):
                    return sent
                log.warning("rollout: the weights of a server differ from those that were sent; all are sent again")
            session.sent = [SentValues() for _ in plan.chunks] if self._delta else []
            for number, values in enumerate(plan.values(runner)):
                sent += values.send({}, group).bytes_sent
                if self._delta:
                    values.keep(session.sent[number])
        return sent

    # -- the group

    def _open(self, runner: Runner, servers: Servers) -> _Session:
        """Returns the session of these servers: the last one, unless others took part or one was restarted."""
        if self._session and self._session.meeting.is_of(servers):
            return self._session
        self._close()
        world_size = dist.get_world_size()
        meeting = Meeting.arrange(servers, TIMEOUT)
        there = meeting.rendezvous
        store = there.store if there else connect_store(meeting.address, meeting.port, TIMEOUT)
        ranks = _place(servers, world_size, device.ranks_of_a_node(world_size))
        plan = self._planned(runner, tuple((ranks[view.number].start, view.layout) for view in servers))
        session = self._session = _Session(meeting, store, ranks, plan)
        # Schedules are computed in the job, so that servers need no tables; its ranks share the work.
        for member in plan.lower_bounds:
            shards = plan.target.shards(member)
            sent = {name: shard for name, shard in shards.items() if shard.pieces}
            dtypes = wire_dtypes(sent, plan.target.tensors, runner.dtype)
            task = Task(
                ranks=session.everyone,
                backend=meeting.backend,
                padding={name: shard.padding for name, shard in shards.items() if shard.padding},
                orders={name: shard.order for name, shard in shards.items() if shard.order},
                dtypes={name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()},
                exact=self._delta or self._wire != "cast",
                schedules=[chunk.received[member] for chunk in plan.chunks],
            )
            store.set(schedule_key(member), task.pack())  # type: ignore[arg-type]  # torch's annotation knows only text
        return session

    def _close(self) -> None:
        """Leaves the group; servers leave theirs when they are asked to join another one."""
        session, self._session = self._session, None
        if session and session.group:
            session.group.abort()  # NCCL would wait for servers that are gone
            dist.destroy_process_group(session.group)

    def _plan(self, runner: Runner, servers: Sequence[tuple[int, str]]) -> TransferPlan:
        """Plans for servers, each by its first rank and layout."""
        by_layout: dict[str, list[int]] = defaultdict(list)
        for start, layout in servers:
            by_layout[layout] += range(start, start + EngineLayout.parse(layout).ranks)
        placements = [EnginePlacement(EngineLayout.parse(text), tuple(ranks)) for text, ranks in by_layout.items()]
        members = sorted(rank for placement in placements for rank in placement.ranks)
        mine = members[dist.get_rank() :: dist.get_world_size()]
        return plan_to_engines(runner, self._table, placements, self._wire, receivers=mine)


def _place(servers: Servers, world_size: int, node: int) -> dict[int, range]:
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
