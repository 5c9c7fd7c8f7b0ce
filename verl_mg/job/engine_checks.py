"""Checks of the section `rollout` that need the model or the engines, after the checks of `verl_mg.config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_mg import device
from verl_mg.checkpoint.peft import adapter_targets
from verl_mg.config import Config
from verl_mg.config.checks import REFUSALS, JobCase, Refusal, refuse, under
from verl_mg.engines.engine_options import FUSED, EngineCase
from verl_mg.engines.kinds import ENGINES
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.layout.suggest import resolve_engine_layout
from verl_mg.lazy_import import lazy_import
from verl_mg.reshard.encode import check_engine_blocks
from verl_mg.reshard.encoding import encoding_of
from verl_mg.sharding.model_table import ModelTable

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from verl_mg.job import engine_tables
    from verl_mg.rollout import remote_engine_group
    from verl_mg.servers import paired_engine
    from verl_mg.weight_sync import shards
else:
    torch = lazy_import("torch")
    dist = lazy_import("torch.distributed")
    engine_tables = lazy_import("verl_mg.job.engine_tables")
    remote_engine_group = lazy_import("verl_mg.rollout.remote_engine_group")
    paired_engine = lazy_import("verl_mg.servers.paired_engine")
    shards = lazy_import("verl_mg.weight_sync.shards")


@dataclass(frozen=True)
class ModelCase:
    """A job whose actor has the weights of a table."""

    job: JobCase
    table: ModelTable

    @property
    def adapted_feed_forward(self) -> str:
        """Names of the feed-forward layers that have adapters."""
        lora = self.job.config.actor.lora
        return ", ".join(sorted({*FUSED[1], "down_proj"} & set(adapter_targets(self.table, lora) if lora else ())))


MODEL_REFUSALS: tuple[Refusal[ModelCase], ...] = (
    Refusal(lambda c: c.job.rollout.wire != "cast" and c.table.tensor_index.has_stacks,
            "rollout.wire={c.job.rollout.wire}: quantized experts of {c.table.config.architecture} are not supported. "
            "Write rollout.wire=cast."),
    Refusal(lambda c: c.table.tensor_index.transposed and c.job.rollout.has_servers
            and (c.job.rollout.weight_transfer != "disk" or c.job.rollout.delta),
            "rollout.weight_transfer={c.job.rollout.weight_transfer}: servers of {c.table.config.architecture}, whose "
            "experts are in stacked tensors, read whole directories only. Write rollout.weight_transfer=disk without "
            "rollout.delta."),
    Refusal(lambda c: c.job.rollout.replay_selections and not c.table.config.indexer,
            "rollout.replay_selections=true: {c.table.config.architecture} has no sparse attention. Leave it out."),
    *under(
        "rollout.adapters=true", lambda c: c.job.rollout.adapters,
        (lambda c: c.table.config.latent, "engines compute latent attention with weights only. Leave it out."),
        # Engines know targets by the last part of the name, which layers of experts and dense layers have in common.
        (lambda c: c.table.config.experts and c.adapted_feed_forward,
         "in a model with experts engines take adapters of {value} for adapters of experts. Name layers of attention "
         "in actor.lora.targets, or leave it out."),
        (lambda c: c.table.config.experts and not c.job.on_gpus and not c.job.engine.expert_models_with_adapters,
         "vLLM then computes experts with kernels for GPUs only. Leave it out, or write rollout.engine=sglang."),
    ),
)  # fmt: skip


def check_job(config: Config, ranks: int) -> JobCase:
    """Checks the section `rollout` without a model, in a job with engines; UserError for the first row that holds."""
    abilities = ENGINES[config.rollout.engine].abilities
    # GPU: vLLM computes experts with adapters, which it refuses on the CPU.
    # GPU-TEST: tests/job/test_refused.py::test_check_engines_possible_configurations_are_accepted
    # GPU-RAN: not yet
    case = JobCase(config, abilities, ranks, device.ranks_of_a_node(ranks), torch.cuda.is_available())
    refuse(REFUSALS, case)
    return case


def check_engines(config: Config, table: ModelTable, ranks: int) -> None:
    """Checks the section `rollout` before anything is built; UserError if it does not fit the model or the ranks."""
    case, rollout = check_job(config, ranks), config.rollout
    refuse(MODEL_REFUSALS, ModelCase(case, table))
    kind = ENGINES[rollout.engine].process
    if rollout.has_servers:
        _check_servers(config, table)
    elif kind is not None:
        kind.python(rollout.python)  # raises if the engine is not installed there
        experts = table.config.experts
        placement = EnginePlacement(case.layout, tuple(range(ranks - case.engine_ranks, ranks)))
        placement.check_nodes(case.ranks_per_node)
        if case.on_gpus:
            of_gpus = EngineCase(
                table, case.layout, case.actor_dtype, case.extra, rollout.wire, blackwell=device.is_blackwell()
            )
            refuse(kind.gpu_refusals, of_gpus)
        table = engine_tables.with_engine_table(config, table)
        resolve_engine_layout(
            case.layout,
            case.engine_ranks,
            experts.count if experts else 0,
            lambda layout: kind.check_layout(EngineCase(table, layout)),
        )
        if encoding := encoding_of(rollout.wire):
            whole = table.shard_map_engine(EnginePlacement(case.layout, tuple(range(case.layout.ranks))))
            check_engine_blocks(table, whole, encoding, whole.ranks)


def _check_servers(config: Config, table: ModelTable) -> None:
    """Checks the addresses, and this rank's servers; UserError if one does not fit."""
    rollout = config.rollout
    listed = remote_engine_group.read_urls(rollout.urls_file) if rollout.urls_file else []
    paired_engine.check_addresses([*rollout.urls, *listed])
    if rollout.urls_file and not (rollout.urls or listed):
        raise UserError(f"rollout.urls_file={rollout.urls_file}: names no server. Write one address a line.")
    if rollout.weight_transfer == "disk" and (folder := rollout.shared_folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"rollout.shared_folder={folder}: cannot be made ({error.strerror}). Name a folder that job and "
                "servers see under the same path."
            ) from None
    keys, leaders = remote_engine_group.server_keys(config), remote_engine_group.server_leaders(config)
    for number, url in enumerate(rollout.urls):
        # One rank probes each server. Which rank leads it later is decided by the `ServerList`.
        if leaders[number % len(leaders)] == dist.get_rank():
            layouts = paired_engine.probe_entry(url, remote_engine_group.server_requirements(config, table), keys)
            parsed = map(EngineLayout.parse, layouts)
            obstacle = "".join(shards.table_obstacle(table, layout, rollout.wire) for layout in parsed)
            if obstacle and (rollout.delta or rollout.wire != "cast"):
                raise UserError(f"{url}: cannot receive shards: {obstacle}. Start the server with another layout.")
