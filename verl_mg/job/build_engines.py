"""The rollout engines that a configuration asks for, built by all ranks together."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
import torch.distributed as dist

from verl_mg import device
from verl_mg.config import Config
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.layout.suggest import resolve_engine_layout
from verl_mg.reshard import best_stride
from verl_mg.roles.context import JobContext
from verl_mg.roles.engine_group import EngineGroup, EngineWrapper, HFEngineGroup, SGLangEngineGroup
from verl_mg.roles.models import Actor
from verl_mg.roles.remote_engine_group import build_remote_engines, check_servers
from verl_mg.roles.weight_sync import SGLangEngineSync, engine_ranks
from verl_mg.rollout.hf.engine import HFEngine
from verl_mg.rollout.sglang import EngineSettings, SGLangEngine, check_on_cpu
from verl_mg.sharding.weight_table import WeightTable


def num_training_ranks(config: Config, ranks: int) -> int:
    """How many of the job's ranks, the first ones, hold actor and reference: all that `rollout.num_ranks` leaves.

    UserError where that is none, or where engines and actor cannot stand apart.
    """
    own = 0 if config.rollout.urls else config.rollout.num_ranks
    if own >= ranks:
        raise UserError(f"rollout.num_ranks={own}: none of the job's {ranks} is left to train; start {own + 1} or more")
    if own and config.rollout.engine == "hf":
        raise UserError(
            f"rollout.num_ranks={own}: the embedded engine stands on the ranks of the actor; leave it out, "
            "or write rollout.engine=sglang"
        )
    return ranks - own


def check_engines(config: Config, table: WeightTable, ranks: int) -> None:
    """UserError, before anything is built, where the rollout's layout or servers fit neither model nor ranks."""
    if config.actor.offload and config.rollout.engine == "hf":
        raise UserError("actor.offload=true: the embedded engine works on the actor's own memory; leave it out")
    if config.rollout.sharding_table and (config.rollout.urls or config.rollout.engine != "sglang"):
        raise UserError(
            "rollout.sharding_table: only SGLang engines inside the job use a table. Leave it out, or write "
            "rollout.engine=sglang without rollout.urls."
        )
    if config.rollout.urls:
        check_servers(config, table)
    elif config.rollout.engine == "sglang":
        if importlib.util.find_spec("sglang") is None:
            raise UserError(
                "rollout.engine=sglang: SGLang is not installed; pip install 'verl-mg[sglang]', "
                "or write rollout.engine=hf"
            )
        placement, experts = _placement(config, ranks), table.config.experts
        table = table.with_traced_table(config.rollout.sharding_table)

        def check(layout: EngineLayout) -> None:
            table.check_engine_layout(layout)
            check_on_cpu(table.model_dims, layout)

        resolve_engine_layout(placement.layout, len(placement.ranks), experts.count if experts else 0, check)


def build_engine_group(
    config: Config, dtype: torch.dtype, actor: Actor, context: JobContext, wrap: EngineWrapper
) -> EngineGroup:
    """The engines, without weights: the first sync brings them."""
    if config.rollout.engine == "hf":
        model = config.model.path
        return HFEngineGroup(
            HFEngine(model, device.current_device(), dtype, config.rollout.max_running_requests, load_weights=False),
            context,
            wrap,
        )
    table = actor.runner.table.with_traced_table(config.rollout.sharding_table)
    if config.rollout.urls:
        return build_remote_engines(config, table, context, wrap)
    ranks = dist.get_world_size()
    node = device.ranks_of_a_node(ranks)
    placement = best_stride(actor.runner.shard_map(), table, _placement(config, ranks), node)
    leaders = {own[0]: number for number, own in engine_ranks(placement).items()}
    rank = dist.get_rank()
    engine = None
    if rank in leaders:
        settings = _settings(config, dtype, placement, table, leaders[rank])
        engine = SGLangEngine(
            config.model.path, settings, _log(config, leaders[rank]), config.rollout.request_timeout_s
        )
    leads = [r in leaders for r in range(ranks)]
    # Engines on ranks of their own have their devices for themselves.
    apart = config.rollout.num_ranks > 0
    sleeps = config.rollout.sleep and not apart
    fixed = config.job.deterministic
    sync = SGLangEngineSync(placement, engine, table)
    return SGLangEngineGroup(sync, engine, leads, context, sleeps=sleeps, apart=apart, fixed=fixed, wrap=wrap)


def _placement(config: Config, ranks: int) -> EnginePlacement:
    layout, own = EngineLayout.parse(config.rollout.layout), config.rollout.num_ranks or ranks
    if own % layout.ranks:
        change = "write rollout.num_ranks as" if config.rollout.num_ranks else "start"
        raise UserError(
            f"rollout.layout={layout}: an engine stands on {layout.ranks} ranks, the rollout has {own} of the job's "
            f"{ranks}; {change} a multiple of {layout.ranks}"
        )
    return EnginePlacement(layout, tuple(range(ranks - own, ranks)))


def _settings(
    config: Config, dtype: torch.dtype, placement: EnginePlacement, table: WeightTable, number: int
) -> EngineSettings:
    node = device.ranks_of_a_node(dist.get_world_size())
    own = engine_ranks(placement)[number]
    if own[0] // node != own[-1] // node:
        raise UserError(f"rollout.layout={placement.layout}: an engine stands within the {node} ranks of a node")
    return EngineSettings(
        layout=placement.layout,
        dtype=dtype,
        max_running=config.rollout.max_running_requests,
        max_positions=table.config.max_positions,
        memory_fraction=config.rollout.memory_fraction,
        first_gpu=device.current_device().index or 0,
        gpu_step=placement.stride,
        seed=config.job.seed + number,
        routed_experts=config.rollout.replay_routing,
        deterministic=config.job.deterministic,
        extra=config.rollout.sglang,
    )


def _log(config: Config, number: int) -> Path:
    return config.job.output / "engines" / f"{number}.log"
