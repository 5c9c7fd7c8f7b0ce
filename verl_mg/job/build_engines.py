"""The rollout engines that a configuration describes; built by all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from verl_mg import device
from verl_mg.config import Config
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.distributed.launcher import Launcher
from verl_mg.engines.engine_attachment import NO_ENGINE, EngineAttachment
from verl_mg.engines.engine_nodes import LeadingNode, node_address
from verl_mg.engines.engine_python import engine_python
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.engines.process_engine import EngineSettings
from verl_mg.engines.sglang import SGLangEngine
from verl_mg.engines.sglang.arguments import QUANTIZATIONS
from verl_mg.engines.sglang.arguments import check_on_cpu as check_sglang_on_cpu
from verl_mg.engines.sglang.arguments import check_on_gpus as check_sglang_on_gpus
from verl_mg.engines.sglang.engine import sglang_follower
from verl_mg.engines.stop_strings import Decode, StopStringEngine
from verl_mg.engines.vllm.arguments import check_on_cpu as check_vllm_on_cpu
from verl_mg.engines.vllm.engine import VLLMEngine, vllm_follower
from verl_mg.errors import UserError
from verl_mg.job.engine_adapters import adapter_settings, check_adapters
from verl_mg.job.engine_parts import EnginePart, engine_part
from verl_mg.job.engine_tables import with_engine_table
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.layout.suggest import resolve_engine_layout
from verl_mg.reshard import best_stride
from verl_mg.reshard.encode import check_engine_blocks
from verl_mg.reshard.encoding import encoding_of
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor
from verl_mg.rollout.engine_group import EngineGroup, EngineWrapper, HFEngineGroup, ProcessEngineGroup
from verl_mg.rollout.remote_engine_group import build_remote_engines, check_servers
from verl_mg.sharding.model_table import ModelTable
from verl_mg.weight_sync.adapters import AdapterSync
from verl_mg.weight_sync.ipc import ProcessEngineSync, engine_groups

ENGINES: Mapping[str, type[SGLangEngine | VLLMEngine]] = {"sglang": SGLangEngine, "vllm": VLLMEngine}
"""Engines that are separate processes, by their names in `rollout.engine`."""
FOLLOWERS = {"sglang": sglang_follower, "vllm": vllm_follower}
"""Functions that start the part of such an engine on a further node."""

# Memory of a device on which only an engine computes that stays for the rank: CUDA's context, chunks in transfer, the
# buffers of NCCL.
RANK_BYTES = 6 * 2**30
END_SECONDS = 60.0
"""Time for an engine to end that a rank has left under another placement."""


def num_training_ranks(config: Config, world_size: int) -> int:
    """Returns how many first ranks hold models: all but the last `rollout.num_ranks`; UserError if none is left."""
    # 8 ranks with `rollout.num_ranks` 2: models on ranks 0 to 5, engines on 6 and 7.
    num_ranks = 0 if config.rollout.has_servers else config.rollout.num_ranks
    if num_ranks >= world_size:
        raise UserError(
            f"rollout.num_ranks={num_ranks}: none of the job's {world_size} ranks is left to train. Start at least "
            f"{num_ranks + 1}."
        )
    if num_ranks and config.rollout.engine == "hf":
        raise UserError(
            f"rollout.num_ranks={num_ranks}: the engine hf works on the ranks of the actor. Leave it out, or write "
            "rollout.engine=sglang or vllm."
        )
    return world_size - num_ranks


def check_engines(config: Config, table: ModelTable, world_size: int) -> None:
    """Checks the section `rollout` before anything is built; UserError if it does not fit the model or the ranks."""
    rollout = config.rollout
    if config.actor.offload and rollout.engine == "hf":
        raise UserError("actor.offload=true: the engine hf works on the actor's own memory. Leave it out.")
    if rollout.mode != "sync" and not (rollout.has_servers or rollout.num_ranks):
        raise UserError(
            f"rollout.mode={rollout.mode}: only engines on separate ranks generate while training computes. "
            "Write rollout.engine=sglang and rollout.num_ranks, or rollout.urls, or rollout.mode=sync."
        )
    if rollout.mode == "async" and rollout.has_servers and rollout.weight_transfer == "disk":
        raise UserError(
            "rollout.mode=async: servers read a folder only between requests. Write "
            "rollout.weight_transfer=process_group, or rollout.mode=one_step_off."
        )
    if rollout.mode == "async" and (rollout.extra_prompts or rollout.partial_rollout):
        raise UserError(
            "rollout.mode=async: engines never wait for the last samples of a call, so rollout.extra_prompts and "
            "rollout.partial_rollout have no use. Leave them out."
        )
    if config.job.deterministic and rollout.mode == "async":
        raise UserError(
            "job.deterministic=true: which samples of rollout.mode=async are complete first depends on time. Write "
            "rollout.mode=one_step_off or sync."
        )
    if config.job.deterministic and rollout.extra_prompts:
        raise UserError(
            "job.deterministic=true: which prompts are complete first depends on time. Write rollout.extra_prompts=0, "
            "so that all are kept."
        )
    if rollout.sharding_table and (rollout.has_servers or rollout.engine == "hf"):
        raise UserError(
            "rollout.sharding_table: only engines inside the job that are separate processes use a table. Leave it "
            "out, or write rollout.engine=sglang or vllm without rollout.urls."
        )
    if rollout.wire != "cast":
        _check_wire(config, table)
    if rollout.delta and rollout.engine != "sglang":
        raise UserError("rollout.delta=true: only SGLang can receive changes instead of all weights. Leave it out.")
    if rollout.delta and rollout.has_servers and rollout.weight_transfer not in ("shards", "disk"):
        raise UserError(
            f"rollout.delta=true: servers receive only shards or files so, and rollout.weight_transfer is "
            f"{rollout.weight_transfer}. Write rollout.weight_transfer=shards or disk, or leave rollout.delta out."
        )
    # SGLang releases its weights when it sleeps. On the CPU nothing is released, see `build_engine_group`.
    loses_weights = rollout.sleep and not rollout.num_ranks and not rollout.has_servers
    if rollout.delta and loses_weights and torch.cuda.is_available():
        raise UserError(
            "rollout.delta=true: engines that sleep lose the weights that changes refer to. Write rollout.sleep=false "
            "or rollout.num_ranks."
        )
    whole = rollout.weight_transfer == "disk" and not rollout.delta
    if table.tensor_index.transposed and rollout.has_servers and not whole:
        raise UserError(
            f"rollout.weight_transfer={rollout.weight_transfer}: servers of {table.config.architecture}, whose experts "
            "are in stacked tensors, read whole directories only. Write rollout.weight_transfer=disk without "
            "rollout.delta."
        )
    if rollout.adapters:
        check_adapters(config, table, device.ranks_of_a_node(world_size))
    if rollout.has_servers:
        check_servers(config, table)
    elif rollout.engine != "hf":
        engine_python(rollout.engine, rollout.python)  # raises if the engine is not installed there
        placement, experts = _placement(config, world_size), table.config.experts
        placement.check_nodes(device.ranks_of_a_node(world_size))
        if rollout.engine == "sglang":
            check_sglang_on_gpus(table.config, config.dtype_of("actor"), rollout.sglang)
        table = with_engine_table(config, table)

        def check(layout: EngineLayout) -> None:
            table.check_engine_layout(layout)
            if rollout.engine == "vllm":
                check_vllm_on_cpu(table.config, layout)
            else:
                check_sglang_on_cpu(table.config, table.model_dims, layout)

        resolve_engine_layout(placement.layout, len(placement.ranks), experts.count if experts else 0, check)


def _check_wire(config: Config, table: ModelTable) -> None:
    """Checks that the engines can have quantized weights."""
    rollout, layout = config.rollout, EngineLayout.parse(config.rollout.layout)
    key = f"rollout.wire={rollout.wire}"
    if rollout.engine != "sglang":
        raise UserError(f"{key}: only SGLang has such weights. Write rollout.wire=cast.")
    if rollout.has_servers and rollout.weight_transfer != "shards":
        raise UserError(
            f"{key}: servers receive quantized weights only as shards, and rollout.weight_transfer is "
            f"{rollout.weight_transfer}. Write rollout.weight_transfer=shards, or rollout.wire=cast."
        )
    if table.tensor_index.transposed:
        raise UserError(
            f"{key}: quantized experts of {table.config.architecture} are not supported. Write rollout.wire=cast."
        )
    if not torch.cuda.is_available():
        raise UserError(f"{key}: SGLang computes with quantized weights on GPUs only. Write rollout.wire=cast.")
    if rollout.wire == "int4" and (rollout.has_servers or rollout.delta):
        raise UserError(
            f"{key}: SGLang stores INT4 weights in another order than they are sent in, so they are not written to "
            "servers outside the job, nor changed in parts. Leave rollout.urls and rollout.delta out."
        )
    if rollout.has_servers:
        return  # their layouts and dtypes are checked when they are connected
    if config.dtype_of("actor") == "float32":
        raise UserError(
            f"{key}: SGLang multiplies quantized weights with inputs of 16 bits, and the actor is in float32. Set "
            "actor.dtype=bfloat16, or rollout.wire=cast."
        )
    encoding, engine = encoding_of(rollout.wire), EnginePlacement(layout, tuple(range(layout.ranks)))
    assert encoding
    whole = with_engine_table(config, table).shard_map_engine(engine)
    check_engine_blocks(table, whole, encoding, whole.ranks)


def ends_at_strings(config: Config) -> bool:
    """Returns whether samples can end at stop strings; requests of agents may contain some."""
    test = config.data.test
    of_sets = [of_set.stop for of_set in test.values()] if isinstance(test, dict) else []
    return config.rollout.has_agents or any((config.rollout.stop, config.evaluation.stop, *of_sets))


def with_stop_strings(decode: Decode, wrap: EngineWrapper) -> EngineWrapper:
    """Returns a wrapper of engines whose samples end at stop strings."""
    # Outside of the engines, by the text of all tokens of a turn: engines miss a string that the policy writes with
    # more tokens than the tokenizer, or that began before an interruption.
    return lambda engine: wrap(StopStringEngine(engine, decode))


def build_engine_group(
    config: Config,
    actor: Actor,
    context: JobContext,
    wrap: EngineWrapper,
    processor: ImageProcessor | None = None,
    decode: Decode | None = None,
) -> EngineGroup:
    """Returns the engines, without weights until the first transfer; they compute in the dtype of the actor.

    `processor` is given for a model that reads images, and `decode` is only for the engine hf.
    """
    rollout, dtype = config.rollout, actor.runner.dtype
    if rollout.engine == "hf":
        slots = rollout.max_running_requests
        engine = HFEngine(config.model.path, device.current_device(), dtype, slots, False, processor, decode)
        return HFEngineGroup(engine, context, wrap)
    if rollout.has_servers:
        table = actor.runner.table.for_engine(rollout.engine)
        return build_remote_engines(config, table, context, wrap, processor)
    table = with_engine_table(config, actor.runner.table)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    node = device.ranks_of_a_node(world_size)
    # An engine's ranks are chosen so that they hold most of its shards already (HybridFlow, arXiv:2409.19256, 5.3).
    placement = best_stride(actor.runner.shard_map(), table, _placement(config, world_size), node)
    leaders = {ranks[0] for ranks in placement.members().values()}
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
        settings = _settings(config, dtype, placement, table, part)
        log = _log(config, part)
        if part.nodes.rank:
            follower = FOLLOWERS[rollout.engine](config.model.path, settings, log, context.store, part.number)
        else:
            several = part.nodes.count > 1
            inner = ENGINES[rollout.engine](
                config.model.path,
                settings,
                log,
                rollout.request_timeout_s,
                LeadingNode(context.store, part.number, part.nodes.address) if several else None,
                None if several else _keeper(),
            )
    # The job that was lost may have had another placement: its engine on this rank would keep the device's memory.
    if inner is None and (launcher := _keeper()):
        EngineAttachment.of_rank(launcher, NO_ENGINE).find(END_SECONDS)
    # Engines of a restarted job may have weights already. They are used only if all have the same version.
    versions = {version for version in all_gather_json(inner.version if inner else None) if version is not None}
    # Engines on separate ranks share their devices with no role, so they need not sleep.
    disjoint = rollout.num_ranks > 0
    adapters, into = adapter_settings(config, table), (placement, groups, inner, table)
    return ProcessEngineGroup(
        AdapterSync(*into, adapters) if adapters else ProcessEngineSync(*into, rollout.wire, rollout.delta),
        inner,
        [r in leaders for r in range(world_size)],
        context,
        follower,
        # On the CPU nothing is released: engines keep their weights.
        sleep=rollout.sleep and not disjoint and device.current_device().type == "cuda",
        disjoint=disjoint,
        static=config.job.deterministic,
        keep_cache=rollout.keep_kv_cache,
        version=min(versions) if len(versions) == 1 else -1,
        wrap=wrap,
    )


def _keeper() -> Launcher | None:
    """Returns the launcher of this node if it keeps engines."""
    launcher = Launcher.of_this_rank()
    return launcher if launcher and launcher.key.exists() else None


def _placement(config: Config, world_size: int) -> EnginePlacement:
    layout, num_ranks = EngineLayout.parse(config.rollout.layout), config.rollout.num_ranks or world_size
    if num_ranks % layout.ranks:
        change = "Write rollout.num_ranks as" if config.rollout.num_ranks else "Start"
        raise UserError(
            f"rollout.layout={layout}: an engine needs {layout.ranks} ranks, but the rollout has {num_ranks} of the "
            f"job's {world_size}. {change} a multiple of {layout.ranks}."
        )
    return EnginePlacement(layout, tuple(range(world_size - num_ranks, world_size)))


def _settings(
    config: Config, dtype: torch.dtype, placement: EnginePlacement, table: ModelTable, part: EnginePart
) -> EngineSettings:
    return EngineSettings(
        layout=placement.layout,
        dtype=dtype,
        quantization=QUANTIZATIONS[config.rollout.wire],
        max_running=config.rollout.max_running_requests,
        max_positions=table.config.max_positions,
        memory_fraction=_memory_fraction(config, device.total_memory()),
        first_gpu=device.current_device().index or 0,
        nodes=part.nodes,
        gpu_step=placement.stride,
        sleeps=config.rollout.sleep and not config.rollout.num_ranks,
        seed=config.job.seed + part.number,
        routed_experts=config.rollout.replay_routing,
        deterministic=config.job.deterministic,
        reads_text=ends_at_strings(config),
        adapters=adapter_settings(config, table),
        python=config.rollout.python,
        extra=config.rollout.vllm if config.rollout.engine == "vllm" else config.rollout.sglang,
    )


def _memory_fraction(config: Config, device_bytes: int | None) -> float:
    """Returns the fraction of the device for an engine; on a separate rank it leaves RANK_BYTES of the device."""
    fraction = config.rollout.memory_fraction
    if device_bytes is None or not config.rollout.num_ranks:
        return fraction
    return min(fraction, max(0.0, 1 - RANK_BYTES / device_bytes))


def _log(config: Config, part: EnginePart) -> Path:
    suffix = f"-node{part.nodes.rank}" if part.nodes.count > 1 else ""
    return config.job.output / "engines" / f"{part.number}{suffix}.log"
