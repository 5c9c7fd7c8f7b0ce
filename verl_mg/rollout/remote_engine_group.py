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
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.request_tracker import routed_shape
from verl_mg.errors import UserError
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor
from verl_mg.rollout.engine_group import EngineWrapper, InFlightEngineGroup
from verl_mg.rollout.server_monitor import ServerList, ServerMonitor
from verl_mg.servers.info import ServerKeys, ServerRequirements
from verl_mg.servers.paired_engine import connect_engine
from verl_mg.servers.pool import ServerPool
from verl_mg.servers.pool_member import LOST_SECONDS
from verl_mg.servers.remote_engine import RemoteEngine
from verl_mg.sharding.model_table import ModelTable
from verl_mg.weight_sync.folder import FolderSync
from verl_mg.weight_sync.servers import SENDER, ServerTransport, gather_views
from verl_mg.weight_sync.shards import ProcessGroupSync

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
        wrap: EngineWrapper = lambda engine: engine,
    ) -> None:
        super().__init__(is_leader, static, context)
        self.engine = wrap(pool) if pool else None
        self._pool, self._sync = pool, sync
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
            self._pool.pause()

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


def build_remote_engines(
    config: Config,
    options: EngineOptions,
    table: ModelTable,
    context: JobContext,
    wrap: EngineWrapper,
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
    group = RemoteEngineGroup(
        _weight_sync(config, table), pool, is_leader, context,
        static=config.job.deterministic, wrap=wrap,
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


def server_requirements(config: Config, table: ModelTable) -> ServerRequirements:
    """Returns what the servers of a job must be able to do."""
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


def server_keys(config: Config) -> ServerKeys:
    """Returns the keys of the servers of a job."""
    return ServerKeys.from_environment(config.rollout.api_key_env, config.rollout.admin_key_env)


def server_leaders(config: Config) -> list[int]:
    """Returns the ranks that lead servers, spread evenly over the ranks; the first one always does."""
    world_size = dist.get_world_size()
    most = MAX_LEADERS if config.rollout.urls_file else len(config.rollout.urls)
    count = min(world_size, most)
    return [number * world_size // count for number in range(count)]
