"""The rollout engines that a configuration describes; built by all ranks together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from verl_mg import device
from verl_mg.config import Config
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.distributed.launcher import Launcher
from verl_mg.engines.engine import Sampling
from verl_mg.engines.engine_attachment import NO_ENGINE, EngineAttachment
from verl_mg.engines.engine_nodes import FollowingNode, LeadingNode, node_address
from verl_mg.engines.engine_options import AdapterSettings, EngineNodes, EngineOptions
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.engines.kinds import ENGINES
from verl_mg.engines.process_engine import ImportingProcess, ProcessEngine
from verl_mg.engines.stop_strings import Decode, StopStringEngine
from verl_mg.job.engine_tables import with_engine_table
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.reshard import best_stride
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor
from verl_mg.rollout.engine_group import EngineGroup, HFEngineGroup, ProcessEngineGroup, WrapEngine
from verl_mg.rollout.remote_engine_group import build_remote_engines
from verl_mg.sharding.model_table import ModelTable
from verl_mg.weight_sync.adapters import AdapterSync
from verl_mg.weight_sync.ipc import ProcessEngineSync, engine_groups

END_SECONDS = 60.0
"""Time for an engine to end that a rank has left under another placement."""


@dataclass(frozen=True)
class EnginePart:
    """A part of an engine, all of it or that on one node, and the rank that starts it."""

    number: int
    nodes: EngineNodes
    """Nodes of the engine, and this one among them."""


def engine_part(placement: EnginePlacement, rank: int, node: int) -> EnginePart | None:
    """Returns the part of an engine that a rank starts, if any: the first rank of an engine on each node."""
    # Engines of 4 ranks on 8 ranks, 2 ranks a node: ranks 0 and 2 start the two parts of engine 0, ranks 4 and 6 the
    # parts of engine 1.
    for number, ranks in placement.members().items():
        # Reversed, so that of the ranks of a node the first one remains in the dict.
        firsts = list({member // node: member for member in reversed(ranks)}.values())[::-1]
        if rank in firsts:
            return EnginePart(number, EngineNodes(len(firsts), firsts.index(rank)))
    return None


def training_sampling(
    config: Config, vocab: int, stop_token_ids: tuple[int, ...], excluded: tuple[int, ...]
) -> Sampling:
    """Returns the sampling of training; a context with an `excluded` token, a placeholder of an image, is invalid."""
    rollout = config.rollout
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=stop_token_ids,
        stop=tuple(rollout.stop),
        excluded_token_ids=excluded,
        returns_support=config.algorithm.support != "full",
        top_logprobs=min(config.sampler_top, vocab),
    )


def with_stop_strings(decode: Decode, wrap: WrapEngine) -> WrapEngine:
    """Returns a wrapper of engines whose samples end at stop strings."""
    # Outside of the engines, by the text of all tokens of a turn: engines miss a string that the policy writes with
    # more tokens than the tokenizer, or that began before an interruption.
    return lambda engine: wrap(StopStringEngine(engine, decode))


def start_imports(config: Config, table: ModelTable) -> ImportingProcess | None:
    """Starts the process of the engine that this rank leads, as far as is known before models are built."""
    rollout, kind = config.rollout, ENGINES[config.rollout.engine].process
    keeper = _keeper()
    if kind is None or rollout.has_servers or (keeper and EngineAttachment.path_of_rank(keeper).exists()):
        return None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks = tuple(range(world_size)[-rollout.num_ranks :])
    # Most often engines have neighbouring ranks. Otherwise the process of a rank that leads none is ended.
    placement = EnginePlacement(EngineLayout.parse(rollout.layout), ranks)
    part = engine_part(placement, rank, device.ranks_of_a_node(world_size))
    if part is None or part.nodes.count > 1:
        return None
    dtype: torch.dtype = getattr(torch, config.dtype_of("actor"))
    options = part_options(EngineOptions.of_job(config, dtype, table), placement, part)
    return ImportingProcess(kind, config.model.path, options, _log(config, part))


def build_engine_group(
    config: Config,
    actor: Actor,
    context: JobContext,
    wrap: WrapEngine,
    processor: ImageProcessor | None = None,
    decode: Decode | None = None,
    longest_row: int | None = None,
    importing: ImportingProcess | None = None,
) -> EngineGroup:
    """Returns the engines, without weights until the first transfer; they compute in the dtype of the actor.

    `processor` is given for a model that reads images, `decode` and `longest_row` are only for the engine hf,
    `importing` is from `start_imports`.
    """
    rollout, dtype, kind = config.rollout, actor.runner.dtype, ENGINES[config.rollout.engine].process
    if kind is None:
        assert rollout.fixed_requests  # `check_engines` has refused another value
        slots = rollout.fixed_requests
        engine = HFEngine(
            config.model.path, device.current_device(), dtype, slots, False, processor, decode, longest_row
        )
        return HFEngineGroup(engine, context, wrap)
    if rollout.has_servers:
        table = actor.runner.table.for_engine(kind.name)
        return build_remote_engines(config, EngineOptions.of_job(config, dtype, table), table, context, wrap, processor)
    table = with_engine_table(config, actor.runner.table)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    node = device.ranks_of_a_node(world_size)
    # An engine's ranks are chosen so that they hold most of its shards already (HybridFlow, arXiv:2409.19256, 5.3).
    layout, ranks = EngineLayout.parse(rollout.layout), range(world_size)[-rollout.num_ranks :]  # all without num_ranks
    placement = best_stride(actor.runner.shard_map(), table, EnginePlacement(layout, tuple(ranks)), node)
    leaders = {members[0] for members in placement.members().values()}
    # An engine sizes its cache by the memory that is free when it starts.
    context.offload.offload_all()
    device.release_unused_memory()
    dist.barrier()
    # Before engines start: threads of a rank that waits in the creation of a group do not run.
    groups = engine_groups(placement)
    inner, follower = None, None
    part = engine_part(placement, rank, node)
    if part:
        if part.nodes.count > 1:
            part = replace(part, nodes=replace(part.nodes, address=node_address(context.store)))
        options = part_options(EngineOptions.of_job(config, dtype, table), placement, part)
        model, log = config.model.path, _log(config, part)
        if part.nodes.rank:
            follower = FollowingNode(kind, model, options, log, context.store, part.number)
        elif part.nodes.count > 1:
            leading = LeadingNode(context.store, part.number, part.nodes.address)
            inner = ProcessEngine(kind, model, options, log, leading)
        else:
            inner = ProcessEngine(kind, model, options, log, launcher=_keeper(), importing=importing)
    if importing and inner is None:  # another rank leads the engine
        importing.close()
    # The job that was lost may have had another placement: its engine on this rank would keep the device's memory.
    if inner is None and (launcher := _keeper()):
        EngineAttachment.of_rank(launcher, NO_ENGINE).find(END_SECONDS)
    # Engines of a restarted job may have weights already. They are used only if all have the same version.
    versions = {version for version in all_gather_json(inner.version if inner else None) if version is not None}
    # Engines on separate ranks share their devices with no role, so they need not sleep.
    disjoint = rollout.num_ranks > 0
    adapters, into = AdapterSettings.of_job(config, table), (placement, groups, inner, table)
    return ProcessEngineGroup(
        AdapterSync(*into, adapters) if adapters else ProcessEngineSync(*into, rollout.wire, rollout.delta),
        inner,
        [r in leaders for r in range(world_size)],
        context,
        follower,
        # GPU: engines that share devices with training sleep while models train.
        # GPU-TEST: tests/weight_sync/test_memory_handover.py::
        # test_update_weights_wakes_engine_after_all_ranks_released_memory
        # GPU-RAN: h200-1, h100-1
        # On the CPU nothing is released: engines keep their weights.
        sleep=rollout.sleep and not disjoint and device.current_device().type == "cuda",
        disjoint=disjoint,
        static=config.job.deterministic,
        version=min(versions) if len(versions) == 1 else -1,
        wrap=wrap,
    )


def passed_choices(config: Config, actor: Actor) -> dict[str, str]:
    """Returns what engines would compute with, as far as their arguments say it; "auto" where they decide."""
    kind = ENGINES[config.rollout.engine].process
    if config.rollout.has_servers:
        return {"servers": "outside of the job"}
    if kind is None:
        return {"process": "that of the rank"}
    options = EngineOptions.of_job(config, actor.runner.dtype, actor.runner.table.for_engine(kind.name))
    return kind.choices(kind.arguments(config.model.path, options))


def _keeper() -> Launcher | None:
    """Returns the launcher of this node if it keeps engines."""
    launcher = Launcher.of_this_rank()
    return launcher if launcher and launcher.key.exists() else None


def part_options(options: EngineOptions, placement: EnginePlacement, part: EnginePart) -> EngineOptions:
    """Returns the options of this rank's part of an engine: its GPUs, its node and its seed."""
    return replace(
        options,
        first_gpu=device.current_device().index or 0,
        nodes=part.nodes,
        gpu_step=placement.stride,
        seed=options.seed + part.number,
    )


def _log(config: Config, part: EnginePart) -> Path:
    suffix = f"-node{part.nodes.rank}" if part.nodes.count > 1 else ""
    return config.job.folder / "engines" / f"{part.number}{suffix}.log"
