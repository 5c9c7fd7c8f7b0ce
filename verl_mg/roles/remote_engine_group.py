"""SGLang servers outside the job as its rollout engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from verl_mg import device
from verl_mg.config import Config, RolloutConfig
from verl_mg.errors import UserError
from verl_mg.roles.context import JobContext
from verl_mg.roles.engine_group import EngineGroup, EngineWrapper
from verl_mg.roles.models import Actor
from verl_mg.roles.process_group_sync import ProcessGroupSync
from verl_mg.roles.remote_weight_sync import RemoteWeightSync, SharedFolderSync, gather_views
from verl_mg.rollout.request_tracker import routed_shape
from verl_mg.rollout.sglang.remote_engine import RemoteEngine
from verl_mg.rollout.sglang.server_info import ServerRequirements, probe_server
from verl_mg.sharding.weight_table import WeightTable

NO_SERVER = -1
"""Number of the server of a rank that leads none."""


class RemoteEngineGroup(EngineGroup):
    """SGLang servers that were started outside the job, each led by one rank."""

    rows_are_local, disjoint = False, True

    def __init__(
        self,
        sync: RemoteWeightSync,
        inner: RemoteEngine | None,
        server: int,
        is_leader: Sequence[bool],
        context: JobContext,
        static: bool = False,
        wrap: EngineWrapper = lambda engine: engine,
    ) -> None:
        """Creates the group.

        Args:
            sync: transfers weights.
            inner: client of the server that this rank leads, if any.
            server: number of that server, or NO_SERVER.
            is_leader: for each rank, whether it leads a server.
            context: the shared services of the job.
            static: whether each server has a fixed share of the work.
            wrap: wraps the engine.
        """
        super().__init__(is_leader, static, context)
        self.engine = wrap(inner) if inner else None
        self._inner, self._server, self._sync = inner, server, sync
        self._actor: Actor | None = None

    def update_weights(self, actor: Actor) -> dict[str, float]:
        """Transfers the weights to all servers."""
        self._actor, self.version = actor, actor.num_updates
        self._offload.load_exclusively(actor.cpu_offload, training=False)
        engines = {self._server: self._inner} if self._inner else {}
        for engine in engines.values():
            engine.wait_until_up()
        return self._sync.transfer(actor, engines, gather_views(engines)).metrics

    def restart_engine(self) -> None:
        """Waits until this rank's server answers again and all ranks have transferred its weights."""
        assert self._inner is not None
        self._inner.restart()
        self.events.announce_restart(self._server)
        while not self._inner.health():
            for server in self.events.unseen_restarts():
                self.recover(server)
        self._inner.resume()

    def recover(self, engine: int) -> None:
        """Transfers weights to a server that was restarted."""
        assert self._actor is not None
        self._offload.load_exclusively(self._actor.cpu_offload, training=False)
        engines = {self._server: self._inner} if self._inner and self._server == engine else {}
        for server in engines.values():
            server.wait_until_up()
        self._sync.transfer(self._actor, engines, gather_views(engines))


def check_servers(config: Config, table: WeightTable) -> None:
    """Checks the section `rollout` and this rank's server before anything is built.

    Args:
        config: of the job.
        table: weights of the actor.

    Raises:
        UserError: the section is not sound, or the server does not fit the job.
    """
    rollout, world_size = config.rollout, dist.get_world_size()
    if rollout.engine != "sglang":
        raise UserError(
            f"rollout.urls: these are SGLang servers, but rollout.engine is {rollout.engine}. Write sglang."
        )
    if len(set(rollout.urls)) < len(rollout.urls):
        raise UserError("rollout.urls: a server is named twice. Name each once.")
    if len(rollout.urls) > world_size:
        raise UserError(
            f"rollout.urls: {len(rollout.urls)} servers for {world_size} ranks. Start at least one rank for each."
        )
    if rollout.weight_transfer == "disk":
        _check_folder(rollout.shared_folder)
    number = _server_of(dist.get_rank(), rollout, world_size)
    if number != NO_SERVER:
        probe_server(rollout.urls[number], _requirements(config, table))


def _check_folder(folder: Path | None) -> None:
    remedy = "Name a folder that job and servers see under the same path."
    if folder is None:
        raise UserError(f"rollout.shared_folder: it is missing, for rollout.weight_transfer=disk. {remedy}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"rollout.shared_folder={folder}: cannot be made ({error.strerror}). {remedy}") from None


def build_remote_engines(
    config: Config, table: WeightTable, context: JobContext, wrap: EngineWrapper
) -> RemoteEngineGroup:
    """Returns the servers of the configuration, without weights of this job until the first transfer.

    Args:
        config: of the job.
        table: weights of the actor.
        context: the shared services of the job.
        wrap: wraps each engine.
    """
    rollout, world_size = config.rollout, dist.get_world_size()
    number = _server_of(dist.get_rank(), rollout, world_size)
    engine = None
    if number != NO_SERVER:
        engine = RemoteEngine(
            rollout.urls[number],
            _requirements(config, table),
            max_running=rollout.max_running_requests,
            request_timeout=rollout.request_timeout_s,
        )
    is_leader = [_server_of(rank, rollout, world_size) != NO_SERVER for rank in range(world_size)]
    static = config.job.deterministic
    return RemoteEngineGroup(_weight_sync(config, table), engine, number, is_leader, context, static, wrap)


def _weight_sync(config: Config, table: WeightTable) -> RemoteWeightSync:
    rollout = config.rollout
    if rollout.weight_transfer == "disk":
        return SharedFolderSync(rollout.shared_folder or Path(), config.model.path)
    return ProcessGroupSync(table, broadcast_to_all=rollout.weight_transfer == "broadcast")


def _requirements(config: Config, table: WeightTable) -> ServerRequirements:
    rollout = config.rollout
    return ServerRequirements(
        table.config,
        config.data.max_prompt_tokens + rollout.max_new_tokens,
        routed_shape(config.model.path) if rollout.replay_routing else None,
        device.current_device().type if rollout.weight_transfer != "disk" else None,
        seeded=config.job.deterministic,
        shards=rollout.weight_transfer == "shards",
    )


def _leaders(num_servers: int, world_size: int) -> list[int]:
    """Returns the rank that leads each server, spread evenly over the ranks."""
    return [server * world_size // num_servers for server in range(num_servers)]


def _server_of(rank: int, rollout: RolloutConfig, world_size: int) -> int:
    leaders = _leaders(len(rollout.urls), world_size)
    return leaders.index(rank) if rank in leaders else NO_SERVER
