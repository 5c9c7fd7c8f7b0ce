"""SGLang servers outside the job as its rollout engines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore

from verl_mg import device
from verl_mg.config import Config
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.distributed.collectives import all_gather_json, sum_over_ranks
from verl_mg.engines.request_tracker import routed_shape
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor
from verl_mg.rollout.engine_group import EngineWrapper, InFlightEngineGroup
from verl_mg.rollout.server_monitor import ServerList, ServerMonitor, read_urls
from verl_mg.servers.info import ServerRequirements
from verl_mg.servers.keys import ServerKeys
from verl_mg.servers.paired_engine import check_addresses, connect_engine, probe_entry
from verl_mg.servers.pool import ServerPool
from verl_mg.servers.pool_member import LOST_SECONDS
from verl_mg.servers.remote_engine import RemoteEngine
from verl_mg.sharding.model_table import ModelTable
from verl_mg.weight_sync.folder import FolderSync
from verl_mg.weight_sync.servers import SENDER, ServerTransport, gather_views
from verl_mg.weight_sync.shards import ProcessGroupSync, table_obstacle

# Most ranks that lead servers of `rollout.urls_file`: each leader reads the counters of the work queue repeatedly.
MAX_LEADERS = 64
RETRY_SECONDS = 0.5
"""Pause between two attempts to find a server for the weights."""

log = logging.getLogger(__name__)


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
        static: bool = False,
        keep_cache: bool = False,
        wrap: EngineWrapper = lambda engine: engine,
    ) -> None:
        super().__init__(is_leader, static, context)
        self.engine = wrap(pool) if pool else None
        self._pool, self._sync, self._keep_cache = pool, sync, keep_cache
        self._monitor: ServerMonitor | None = None
        self._actor: Actor | None = None

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
        while True:
            metrics = self._transfer(actor, None)
            if metrics is not None:
                break
            self._check_patience(started)
            time.sleep(RETRY_SECONDS)
        lost = sum_over_ranks([{"rollout/lost_servers": self._pool.take_num_lost() if self._pool else 0}])
        return metrics | lost

    def close(self) -> None:
        """Disconnects from the servers."""
        if self._monitor:
            self._monitor.close()
        if self._pool:
            self._pool.close()

    def pause_generation(self) -> None:
        """Pauses the servers of this rank between two tokens."""
        if self._pool:
            self._pool.pause(keep_cache=self._keep_cache)

    def continue_generation(self) -> None:
        """Continues the servers of this rank."""
        if self._pool:
            self._pool.unpause()

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
            self._pool.confirm([view.number for view in views if view.number in engines])
        return metrics

    def _check_patience(self, started: float) -> None:
        waited = time.monotonic() - started
        # The clock of one rank decides, so that all ranks raise in the same pass.
        if all_gather_json(waited > LOST_SECONDS)[SENDER]:
            raise UserError(
                f"rollout.urls: no server responds for {LOST_SECONDS:.0f} s. Start servers, then the job again."
            )


def check_servers(config: Config, table: ModelTable) -> None:
    """Checks the section `rollout` and this rank's servers before anything is built; UserError if one does not fit."""
    rollout = config.rollout
    if rollout.engine != "sglang":
        raise UserError(
            f"rollout.urls: these are SGLang servers, but rollout.engine is {rollout.engine}. Write sglang."
        )
    check_addresses([*rollout.urls, *(read_urls(rollout.urls_file) if rollout.urls_file else ())])
    if rollout.urls_file and config.job.deterministic:
        raise UserError(
            "job.deterministic=true: servers that come and go make samples depend on time. Write rollout.urls instead "
            "of rollout.urls_file."
        )
    if rollout.urls_file and not (rollout.urls or read_urls(rollout.urls_file)):
        raise UserError(f"rollout.urls_file={rollout.urls_file}: names no server. Write one address a line.")
    if rollout.weight_transfer == "disk":
        _check_folder(rollout.shared_folder)
    keys = _keys(config)
    leaders = _leaders(config)
    for number, url in enumerate(rollout.urls):
        # One rank probes each server. Which rank leads it later is decided by the `ServerList`.
        if leaders[number % len(leaders)] == dist.get_rank():
            layouts = probe_entry(url, _requirements(config, table), keys)
            obstacle = "".join(table_obstacle(table, EngineLayout.parse(layout), rollout.wire) for layout in layouts)
            if obstacle and (rollout.delta or rollout.wire != "cast"):
                raise UserError(f"{url}: cannot receive shards: {obstacle}. Start the server with another layout.")


def _check_folder(folder: Path | None) -> None:
    remedy = "Name a folder that job and servers see under the same path."
    if folder is None:
        raise UserError(f"rollout.shared_folder: it is missing, for rollout.weight_transfer=disk. {remedy}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"rollout.shared_folder={folder}: cannot be made ({error.strerror}). {remedy}") from None


def build_remote_engines(
    config: Config, table: ModelTable, context: JobContext, wrap: EngineWrapper, processor: ImageProcessor | None = None
) -> RemoteEngineGroup:
    """Returns the servers of the configuration, without weights of this job until the first transfer."""
    rollout, rank, leaders = config.rollout, dist.get_rank(), _leaders(config)
    requirements, keys = _requirements(config, table), _keys(config)

    # Called by the monitor's threads, for servers that the job may not know yet.
    def connect(url: str, borrowed: bool, on_arrival: Callable[[], None]) -> RemoteEngine:
        return connect_engine(
            url, requirements, keys, max_running=rollout.max_running_requests,
            request_timeout=rollout.request_timeout_s, borrowed=borrowed, on_arrival=on_arrival, processor=processor,
        )  # fmt: skip

    servers = None
    if rank == SENDER:
        store = context.store.clone()  # type: ignore[attr-defined]
        servers = ServerList(PrefixStore("servers", store), leaders, rollout.urls, rollout.urls_file)
    dist.barrier()  # the list exists
    pool = ServerPool(connect) if rank in leaders else None
    is_leader = [other in leaders for other in range(dist.get_world_size())]
    group = RemoteEngineGroup(
        _weight_sync(config, table), pool, is_leader, context,
        static=config.job.deterministic, keep_cache=rollout.keep_kv_cache, wrap=wrap,
    )  # fmt: skip
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


def _requirements(config: Config, table: ModelTable) -> ServerRequirements:
    rollout = config.rollout
    return ServerRequirements(
        table.config,
        config.data.max_prompt_tokens + rollout.max_new_tokens,
        routed_shape(config.model.path) if rollout.replay_routing else None,
        device.current_device().type if rollout.weight_transfer != "disk" else None,
        seeded=config.job.deterministic,
        shards=rollout.weight_transfer == "shards" or (rollout.weight_transfer == "disk" and rollout.delta),
        wire=rollout.wire,
        in_flight=rollout.mode == "async",
    )


def _keys(config: Config) -> ServerKeys:
    return ServerKeys.from_environment(config.rollout.api_key_env, config.rollout.admin_key_env)


def _leaders(config: Config) -> list[int]:
    """Returns the ranks that lead servers, spread evenly over the ranks; the first one always does."""
    world_size = dist.get_world_size()
    most = MAX_LEADERS if config.rollout.urls_file else len(config.rollout.urls)
    count = min(world_size, most)
    return [number * world_size // count for number in range(count)]
