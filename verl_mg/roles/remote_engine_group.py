"""SGLang servers that somebody else has started, as the rollout engines of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore

from verl_mg import device
from verl_mg.config import Config, RolloutConfig
from verl_mg.errors import UserError
from verl_mg.roles.context import JobContext
from verl_mg.roles.engine_group import EngineGroup, EngineWrapper
from verl_mg.roles.engine_restarts import EngineRestarts
from verl_mg.roles.models import Actor
from verl_mg.roles.remote_weight_sync import ProcessGroupSync, RemoteWeightSync, SharedFolderSync
from verl_mg.rollout.sglang.remote_engine import RemoteEngine
from verl_mg.rollout.sglang.request_tracker import routed_shape
from verl_mg.rollout.sglang.server_info import ServerRequirements, probe_server
from verl_mg.sharding.weight_table import WeightTable

NO_SERVER = -1


class RemoteEngineGroup(EngineGroup):
    """Servers, each led by one rank."""

    at_home, apart = False, True

    def __init__(
        self,
        sync: RemoteWeightSync,
        inner: RemoteEngine | None,
        server: int,
        leads: Sequence[bool],
        context: JobContext,
        fixed: bool = False,
        wrap: EngineWrapper = lambda engine: engine,
    ) -> None:
        super().__init__(leads, fixed, context)
        self.engine = wrap(inner) if inner else None
        self._inner, self._server, self._sync = inner, server, sync
        self._revivals = EngineRestarts(PrefixStore("rollout", context.store))
        self._actor: Actor | None = None

    def sync(self, actor: Actor) -> dict[str, float]:
        """See `EngineGroup`."""
        self._actor, self.version = actor, actor.num_updates
        self._offload.load_exclusively(actor.cpu_offload, training=False)
        return self._sync.sync(actor)

    def revive(self) -> None:
        """See `verl_mg.rollout.engine_loop.Rescue`."""
        assert self._inner is not None
        self._inner.restart()
        self._revivals.announce(self._server)
        while not self._inner.health():
            self.serve()
        self._inner.resume()

    def serve(self) -> None:
        """See `verl_mg.rollout.engine_loop.Rescue`."""
        for server in self._revivals.unseen():
            assert self._actor is not None
            self._offload.load_exclusively(self._actor.cpu_offload, training=False)
            self._sync.sync_one(self._actor, server)


def check_servers(config: Config, table: WeightTable) -> None:
    """UserError, before anything is built, where the servers' section is not sound, or this rank's server unfit."""
    rollout, ranks = config.rollout, dist.get_world_size()
    if rollout.engine != "sglang":
        raise UserError(f"rollout.urls: these are SGLang servers, rollout.engine is {rollout.engine}; write sglang")
    if len(set(rollout.urls)) < len(rollout.urls):
        raise UserError("rollout.urls: a server is named twice; name each once")
    if len(rollout.urls) > ranks:
        raise UserError(f"rollout.urls: {len(rollout.urls)} servers for {ranks} ranks; start at least one for each")
    if rollout.weight_transfer == "disk":
        _check_folder(rollout.shared_folder)
    number = _server_of(dist.get_rank(), rollout, ranks)
    if number != NO_SERVER:
        probe_server(rollout.urls[number], _demand(config, table))


def _check_folder(folder: Path | None) -> None:
    remedy = "name a folder that job and servers see under the same path"
    if folder is None:
        raise UserError(f"rollout.weight_transfer=disk: rollout.shared_folder is missing; {remedy}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"rollout.shared_folder={folder}: cannot be made ({error.strerror}); {remedy}") from None


def build_remote_engines(
    config: Config, table: WeightTable, context: JobContext, wrap: EngineWrapper
) -> RemoteEngineGroup:
    """The fleet that the configuration names; without weights of this job until the first sync."""
    rollout, ranks = config.rollout, dist.get_world_size()
    number = _server_of(dist.get_rank(), rollout, ranks)
    engine = None
    if number != NO_SERVER:
        engine = RemoteEngine(
            rollout.urls[number],
            _demand(config, table),
            max_running=rollout.max_running_requests,
            request_timeout=rollout.request_timeout_s,
        )
    leads = [_server_of(rank, rollout, ranks) != NO_SERVER for rank in range(ranks)]
    fixed = config.job.deterministic
    return RemoteEngineGroup(_sync(config, engine, number), engine, number, leads, context, fixed, wrap)


def _sync(config: Config, engine: RemoteEngine | None, number: int) -> RemoteWeightSync:
    rollout = config.rollout
    if rollout.weight_transfer == "disk":
        return SharedFolderSync(engine, number, rollout.shared_folder or Path(), config.model.path)
    return ProcessGroupSync(engine, number, _leaders(len(rollout.urls), dist.get_world_size()), rollout.urls)


def _demand(config: Config, table: WeightTable) -> ServerRequirements:
    rollout = config.rollout
    return ServerRequirements(
        table.config,
        config.data.max_prompt_tokens + rollout.max_new_tokens,
        routed_shape(config.model.path) if rollout.replay_routing else None,
        device.current_device().type if rollout.weight_transfer == "process_group" else None,
        seeded=config.job.deterministic,
    )


def _leaders(servers: int, ranks: int) -> list[int]:
    """The rank that leads each server, spread evenly."""
    return [server * ranks // servers for server in range(servers)]


def _server_of(rank: int, rollout: RolloutConfig, ranks: int) -> int:
    leaders = _leaders(len(rollout.urls), ranks)
    return leaders.index(rank) if rank in leaders else NO_SERVER
