"""SGLang servers outside the job as its rollout engines: their list, their monitor and their group.

The list of servers may change while the job runs; a thread of each leading rank looks after them.

    rank 0           reads `rollout.urls_file`, decides which rank leads each server ──▶ store, key "list"
    each leader      thread "servers", one cycle a second:
                     list ──▶ reaches new or lost servers, in a short thread each
                     servers without weights ──▶ announced as restarted engines: all ranks transfer weights to them
                     servers with weights    ──▶ store, keys "ready/NUMBER"
                     requests wait, none ready  ──▶ borrows ready servers of other leaders
                     every 5th cycle             checks ready servers, in a short thread

The work queue and the loop over samples are the main thread's; both threads meet in the `ServerPool`.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from verl_mg import device
from verl_mg.config import Config
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.distributed.collectives import all_gather_json, sum_over_ranks
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.request_tracker import routed_shape
from verl_mg.errors import UserError
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor
from verl_mg.rollout.engine_group import InFlightEngineGroup, WrapEngine
from verl_mg.rollout.engine_worker import EngineEvents
from verl_mg.servers.info import ServerKeys, ServerRequirements
from verl_mg.servers.paired_engine import check_addresses, connect_engine, parts_of
from verl_mg.servers.pool import ServerPool
from verl_mg.servers.pool_member import LOST_SECONDS, Server, State
from verl_mg.servers.remote_engine import RemoteEngine
from verl_mg.sharding.model_table import ModelTable
from verl_mg.weight_sync.folder import FolderSync
from verl_mg.weight_sync.servers import SENDER, ServerTransport, gather_views
from verl_mg.weight_sync.shards import ProcessGroupSync

CYCLE_SECONDS = 1.0
"""Interval at which a rank looks at its list and its servers."""
HEALTH_CYCLES = 5
"""Cycles between two checks of servers that are ready."""
LIST_KEY = "list"
"""Key of the store with the number, the address and the leader of each server."""
# Most ranks that lead servers of `rollout.urls_file`: each leader reads the counters of the work queue repeatedly.
MAX_LEADERS = 64
RETRY_SECONDS = 0.5
"""Pause between two attempts to find a server for the weights."""

log = logging.getLogger(__name__)


def read_urls(path: Path) -> list[str]:
    """Reads a file of servers, one address a line, without what follows "#"; UserError where that is not possible."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"rollout.urls_file={path}: cannot be read ({error}). Write one address a line.") from None
    urls: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        url = line.partition("#")[0].strip().rstrip("/")
        if url and not url.startswith(("http://", "https://")):
            raise UserError(f"{path}, line {number}: {url!r} is not an address. Write http://HOST:PORT.")
        if url:
            urls[url] = None
    return list(urls)


class ServerList:
    """Numbers and leaders of servers, on rank 0: `urls` stay, the file at `path` is read again and again."""

    def __init__(self, store: Store, leaders: Sequence[int], urls: Sequence[str], path: Path | None) -> None:
        self._store, self._leaders, self._urls, self._path = store, leaders, urls, path
        self._entries: dict[str, tuple[int, int]] = {}  # by address: number and leader
        self._next_number = 0  # numbers are not used again: a server that returns to the list is a new one
        self._problem = ""
        self.update()

    def update(self) -> None:
        """Reads the file again, and publishes what has changed; a file that is not valid changes nothing."""
        try:
            urls = [*self._urls, *(read_urls(self._path) if self._path else ())]
            check_addresses(urls)
            self._problem = ""
        except UserError as error:
            if str(error) != self._problem:  # reported once, not in each cycle
                log.warning("%s The servers stay as they are.", error)
                self._problem = str(error)
            return
        if set(urls) == self._entries.keys() and self._entries:
            return
        self._entries = {url: entry for url, entry in self._entries.items() if url in urls}
        for url in dict.fromkeys(urls):
            if url not in self._entries:
                # Servers that stay keep their leaders, which have their requests; a new one goes to the rank with the
                # fewest servers.
                load = Counter(leader for _, leader in self._entries.values())
                leader = min(self._leaders, key=lambda rank: load[rank])
                self._entries[url] = self._next_number, leader
                self._next_number += len(parts_of(url))  # each server of a pair receives weights
        self._store.set(LIST_KEY, json.dumps([[*entry, url] for url, entry in self._entries.items()]))


class ServerMonitor:
    """Thread of a rank that reaches and checks its servers, and borrows servers of other ranks when it has none.

    `version` returns the policy version of servers that are ready; `servers` is the list, on the first rank.
    """

    def __init__(
        self, pool: ServerPool, store: Store, rank: int, version: Callable[[], int], servers: ServerList | None = None
    ) -> None:
        self._pool, self._rank, self._version, self._list = pool, rank, version, servers
        self._store = PrefixStore("servers", store)
        self._events = EngineEvents(store)
        self._all: dict[int, tuple[int, str]] = {}
        self._announced: set[int] = set()
        self._published: set[int] = set()
        self._reaching: set[int] = set()
        self._stop = threading.Event()
        self._num_cycles = 0
        self._thread = threading.Thread(target=self._run, daemon=True, name="servers")
        # Reached here once, so that the first weight sync finds the servers that are up.
        self._read_list()
        for server in pool.due(time.monotonic()):
            pool.reach(server)

    def start(self) -> None:
        """Starts the thread of the monitor."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread of the monitor."""
        self._stop.set()
        self._pool.attention.set()  # wakes the thread
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        # Waits for CYCLE_SECONDS; woken earlier when the pool loses or reaches a server; ends with `close`.
        while not self._stop.is_set():
            self._pool.attention.wait(CYCLE_SECONDS)
            self._pool.attention.clear()
            if not self._stop.is_set():
                try:
                    self._cycle()
                except Exception:  # the job needs this thread as long as it runs: the next cycle tries again
                    if self._stop.is_set():
                        return
                    log.exception("rollout: the servers could not be looked after")
                    time.sleep(CYCLE_SECONDS)

    def _cycle(self) -> None:
        self._num_cycles += 1
        if self._list:
            self._list.update()
        self._read_list()
        for server in self._pool.due(time.monotonic()):
            if server.number not in self._reaching:
                self._reaching.add(server.number)
                _start(self._reach, server)  # a host that is gone takes its time to say so
        bare = self._pool.views(State.BARE).keys()
        for number in bare - self._announced:
            self._events.announce_restart(number)
        self._announced = set(bare)
        self._publish()
        if self._pool.needs_help:
            self._borrow()
        if self._num_cycles % HEALTH_CYCLES == 0:
            _start(self._pool.check_ready)

    def _reach(self, server: Server) -> None:
        if self._pool.reach(server):
            self._pool.attention.set()
        self._reaching.discard(server.number)

    def _read_list(self) -> None:
        entries = json.loads(self._store.get(LIST_KEY))
        self._all = {number: (leader, url) for number, leader, url in entries}
        self._pool.assign({number: url for number, (leader, url) in self._all.items() if leader == self._rank})

    def _publish(self) -> None:
        """Writes into the store which servers of this rank are ready."""
        ready = set(self._pool.views(State.READY))
        for number in ready ^ self._published:
            self._store.set(f"ready/{number}", "1" if number in ready else "")
        self._published = ready

    def _borrow(self) -> None:
        """Finds servers of other ranks that are ready."""
        others = {number: url for number, (leader, url) in self._all.items() if leader != self._rank}
        # Checked first, because `get` waits for a key that was never set.
        known = {number: url for number, url in others.items() if self._store.check([f"ready/{number}"])}
        ready = {number: url for number, url in known.items() if self._store.get(f"ready/{number}")}
        self._pool.borrow(ready, self._version())


def _start(function: Callable[..., Any], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


class RemoteEngineGroup(InFlightEngineGroup):
    """SGLang servers that were started outside the job; each rank that leads servers has them in a pool."""

    # The loss of a server is not the death of an engine: the pool gives its samples to others. A server that responds
    # again, or a new one, is announced as restarted, and all ranks transfer the weights to it.

    def __init__(
        self,
        sync: ServerTransport,
        pool: ServerPool | None,
        is_leader: Sequence[bool],
        context: JobContext,
        static: bool,
        wrap: WrapEngine,
    ) -> None:
        super().__init__(pool, is_leader, context, static, wrap)
        self._pool, self._sync = pool, sync
        self._monitor: ServerMonitor | None = None

    def watch(self, monitor: ServerMonitor) -> None:
        """Starts to look after this rank's servers; the group ends it."""
        self._monitor = monitor
        monitor.start()

    def update_weights(self, actor: Actor) -> dict[str, float]:
        """Transfers the weights to all servers but those lost meanwhile; UserError if none responds in LOST_SECONDS."""
        self._actor, self.version = actor, actor.num_updates
        self._offload.load_exclusively(actor.cpu_offload, training=False)
        started = time.monotonic()
        # Ends with the first transfer that reaches a server; a monitor that finds one again unblocks it.
        while (metrics := self._transfer(actor, None)) is None:
            # The clock of one rank decides, so that all ranks raise in the same pass.
            if all_gather_json(time.monotonic() - started > LOST_SECONDS)[SENDER]:
                raise UserError(
                    f"rollout.urls: no server responds for {LOST_SECONDS:.0f} s. Start servers, then the job again."
                )
            time.sleep(RETRY_SECONDS)
        lost = sum_over_ranks([{"rollout/lost_servers": self._pool.take_num_lost() if self._pool else 0}])
        return metrics | lost

    def close(self) -> None:
        """Disconnects from the servers."""
        for part in (self._monitor, self._pool):
            if part:
                part.close()

    def recover(self, engine: int) -> None:
        """Transfers weights to a server that is new or was restarted, unless it has received them since."""
        assert self._actor is not None
        self._offload.load_exclusively(self._actor.cpu_offload, training=False)
        self._transfer(self._actor, engine)

    def _transfer(self, actor: Actor, only: int | None) -> dict[str, float] | None:
        """Transfers the weights to all servers that respond, or to one; returns None if none has received them."""
        engines = self._pool.receivers(None if only is None else [only]) if self._pool else {}
        views = gather_views(engines)
        metrics = None
        # Repeats without the servers that were lost: after a loss no server has the weights for certain. All ranks make
        # the same passes, because they have the same views and losses.
        while views:
            result = self._sync.transfer(actor.weights, engines, views)
            for number in result.lost & engines.keys():
                assert self._pool is not None
                self._pool.lose(number, f"{engines[number].url} was lost during a weight sync")
            if not result.lost:
                metrics = result.metrics | {"rollout/servers": float(len(views))}
                break
            views = [view for view in views if view.number not in result.lost]
        if self._pool:  # also where no server has the weights: it ends the update of the pool
            self._pool.confirm([view.number for view in views], self.version)
        return metrics


def build_remote_engines(
    config: Config,
    options: EngineOptions,
    table: ModelTable,
    context: JobContext,
    wrap: WrapEngine,
    processor: ImageProcessor | None = None,
) -> RemoteEngineGroup:
    """Returns the servers of the configuration, without weights of this job until the first transfer."""
    rollout, rank, leaders = config.rollout, dist.get_rank(), server_leaders(config)
    requirements, keys = server_requirements(config, table), server_keys(config)

    # Called by the monitor's threads, for servers that the job may not know yet.
    def connect(url: str, borrowed: bool, on_arrival: Callable[[], None]) -> RemoteEngine:
        return connect_engine(url, requirements, options, keys, processor, borrowed=borrowed, on_arrival=on_arrival)

    servers = None
    if rank == SENDER:
        store = context.store.clone()  # type: ignore[attr-defined]
        servers = ServerList(PrefixStore("servers", store), leaders, rollout.urls, rollout.urls_file)
    dist.barrier()  # the list exists
    pool = ServerPool(connect) if rank in leaders else None
    is_leader = [other in leaders for other in range(dist.get_world_size())]
    sync, static = _weight_sync(config, table), config.job.deterministic
    group = RemoteEngineGroup(sync, pool, is_leader, context, static, wrap)
    if pool:
        # The monitor's thread has its own connection: while a thread waits for a key, its connection is blocked.
        store = context.store.clone()  # type: ignore[attr-defined]
        group.watch(ServerMonitor(pool, store, rank, lambda: group.version, servers))
    return group


def _weight_sync(config: Config, table: ModelTable) -> ServerTransport:
    rollout = config.rollout
    if rollout.weight_transfer == "disk":
        return FolderSync(rollout.shared_folder or Path(), config.model.path, table if rollout.delta else None)
    return ProcessGroupSync(table, rollout.weight_transfer == "broadcast", rollout.wire, rollout.delta)


def server_requirements(config: Config, table: ModelTable) -> ServerRequirements:
    """Returns what the servers of a job must be able to do."""
    rollout = config.rollout
    asks = rollout.limits_draws and getattr(config.algorithm, "support", "full") != "full"
    return ServerRequirements(
        table.config,
        config.data.max_prompt_tokens + rollout.max_new_tokens,
        routed_shape(config.model.path) if rollout.replay_routing else None,
        device.current_device().type if rollout.weight_transfer != "disk" else None,
        seeded=config.job.deterministic,
        shards=rollout.weight_transfer == "shards" or (rollout.weight_transfer == "disk" and rollout.delta),
        wire=rollout.wire,
        in_flight=rollout.mode == "async",
        candidates=min(rollout.top_k or table.config.vocab, table.config.vocab) if asks else 0,
    )


def server_keys(config: Config) -> ServerKeys:
    """Returns the keys of the servers of a job."""
    return ServerKeys.from_environment(config.rollout.api_key_env, config.rollout.admin_key_env)


def server_leaders(config: Config) -> list[int]:
    """Returns the ranks that lead servers, spread evenly over the ranks; the first one always does."""
    world_size = dist.get_world_size()
    most = MAX_LEADERS if config.rollout.urls_file else len(config.rollout.urls)
    count = min(world_size, most)
    return [number * world_size // count for number in range(count)]
