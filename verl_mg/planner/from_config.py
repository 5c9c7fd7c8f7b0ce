"""Inputs of a plan from a job's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_mg.config import Config, CriticConfig, FrozenConfig, TrainableConfig
from verl_mg.engines.kinds import ENGINES, ProcessKind
from verl_mg.errors import UserError
from verl_mg.fsdp.options import check_trainable
from verl_mg.layout import Layout, parse_ranks
from verl_mg.planner.inputs import AuxiliaryRole
from verl_mg.planner.training_options import TrainingOptions, frozen_options, fsdp_options, recompute, training_options
from verl_mg.sharding.traced_table import EngineName

AUXILIARY_SECTIONS = {
    "critic": "critic",
    "reward_model": "reward_model",
    "frozen_reward_model": "reward_model",
    "process_reward": "process_reward",
    "reference": "reference",
}
"""Auxiliary roles and their sections of the configuration."""


def _is_frozen(name: str) -> bool:
    return name in ("frozen_reward_model", "reference") or name.startswith("teachers.")


@dataclass(frozen=True)
class PlanRequest:
    """Values of a configuration for a plan; empty without a configuration."""

    model: str | None = None  # model directory of the actor
    train: Layout | None = None
    rollout: str | None = None  # layout of an engine
    roles: tuple[AuxiliaryRole, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)  # fields of `PlanInputs` by name
    notes: tuple[str, ...] = ()  # assumptions of the plan that differ from the job, one line each
    sharding_table: Path | None = None  # traced table of the rollout engine (`rollout.sharding_table`)
    engine: EngineName = "sglang"  # rollout engine (`rollout.engine`)


def plan_request(config: Config, roles: set[str]) -> PlanRequest:
    """Returns the values of a configuration for a plan with the roles that the recipe requests, by name."""
    kind = _engine_kind(config, roles)
    # Each recipe has another section `algorithm`, hence the defaults for keys that it may not have.
    actor, rollout, algorithm = config.actor, config.rollout, config.algorithm
    sequence = config.data.max_prompt_tokens + rollout.max_new_tokens
    fields = {
        "sequence": sequence,
        "micro_batch": actor.tokens_per_micro_batch,
        "recompute": recompute(actor.recompute),
        "options": _options(config, "actor"),
        "old_logprobs": getattr(algorithm, "old_logprobs", "recompute") == "recompute",
        "prompt": config.data.max_prompt_tokens,
        "minibatches": getattr(algorithm, "num_minibatches", 1),
        "epochs": getattr(algorithm, "num_epochs", 1),
        "rollout_ranks": rollout.num_ranks,
        "memory_fraction": rollout.memory_fraction,
        "max_running_requests": rollout.fixed_requests or 0,  # 0: what fits
        "role_ranks": parse_ranks(actor.ranks) if actor.ranks else (),
        "offload": actor.offload,
        "sleep": rollout.sleep,
        "wire": rollout.wire,
        "delta": rollout.delta,
        "prefetch": rollout.mode != "sync",
    }
    # An upper bound: every sample has the full length. `--mean-sequence` replaces it by a mean.
    if prompts := getattr(algorithm, "prompts_per_iteration", None):
        fields["tokens_per_iteration"] = prompts * getattr(algorithm, "group_size", 1) * sequence
    keys = [f"teachers.{name}" for name, teacher in config.teachers.items() if teacher.has_model]
    teachers = {key: key for key in keys if "teachers" in roles}
    sections, roles = AUXILIARY_SECTIONS | teachers, roles | teachers.keys()
    auxiliary = tuple(_role(config, name, section) for name, section in sections.items() if name in roles)
    notes = tuple(_notes(config, {"actor": "actor", **sections}, roles))
    model, table = str(config.model.path), rollout.sharding_table
    return PlanRequest(model, actor.parallel_sizes, rollout.layout, auxiliary, fields, notes, table, kind.name)


def _engine_kind(config: Config, roles: set[str]) -> ProcessKind:
    if "rollout" not in roles:
        raise UserError(
            "the recipe generates no samples, and a plan covers training and rollout. Name a recipe with a rollout."
        )
    kind = ENGINES[config.rollout.engine].process
    if kind is None:
        raise UserError(
            f"rollout.engine={config.rollout.engine}: only engines that are separate processes can be planned. Set "
            "rollout.engine=sglang or vllm."
        )
    if config.rollout.has_servers:
        raise UserError("rollout.urls: servers outside the job cannot be planned. Leave the key out of the plan.")
    if (dtype := config.dtype_of("actor")) != "bfloat16":
        key = "actor.dtype" if config.actor.dtype else "model.dtype"
        raise UserError(f"{key}={dtype}: only a bf16 actor can be planned. Set {key}=bfloat16.")
    return kind


def _notes(config: Config, sections: dict[str, str], roles: set[str]) -> Iterator[str]:
    if config.rollout.adapters:
        yield "rollout.adapters: the weight sync is counted as the first one, later ones send only adapters"
    if "teachers" in roles and getattr(config.algorithm, "divergence", None) and not config.algorithm.divergence.top_k:
        yield "algorithm.divergence: the teachers' output layers on the actor's last stage are not counted"
    for name, section in sections.items():
        if name not in roles:
            continue
        role, is_trained = config.section(section), not _is_frozen(name)
        if config.dtype_of(section) == "float32":
            yield f"{name}.dtype: its matrix products are counted at the rate of bf16, float32 is many times slower"
        if is_trained and role.lora:
            shared = name == "actor" and "reference" in roles and config.reference_is_unadapted_actor
            yield f"{name}.lora: counted as if all weights were trained" + ", and the reference's separate" * shared
        if is_trained and role.optimizer.nvme_folder:
            yield f"{name}.optimizer.nvme_folder: counted as if the moments were in host memory"
        if role.dynamic_context:
            yield f"{name}.dynamic_context: counted as if every row were sharded over all context-parallel ranks"


def _options(config: Config, key: str, is_trained: bool = True) -> TrainingOptions:
    section, dtype, kernels = config.section(key), config.dtype_of(key), config.model.kernels
    if section.backend == "fsdp":
        if is_trained:
            check_trainable(section, key)
        return fsdp_options(config.fsdp, dtype)
    if not is_trained:
        return frozen_options(kernels, dtype)
    optimizer, megatron = section.optimizer, config.megatron.model_dump()
    return training_options(kernels, megatron, optimizer.cpu_offload, optimizer.moments_dtype, optimizer.kind, dtype)


def _role(config: Config, name: str, key: str) -> AuxiliaryRole:
    section: TrainableConfig | FrozenConfig = config.section(key)
    path = section.path if isinstance(section, CriticConfig | FrozenConfig) else None
    is_trained = not _is_frozen(name)
    trained = section if is_trained and isinstance(section, TrainableConfig) else None
    return AuxiliaryRole(
        name,
        section.parallel_sizes,
        is_trained,
        section.tokens_per_micro_batch,
        recompute(trained.recompute) if trained else False,
        str(path) if path else None,
        parse_ranks(section.ranks) if section.ranks else (),
        section.offload,
        _options(config, key, trained is not None),
    )
