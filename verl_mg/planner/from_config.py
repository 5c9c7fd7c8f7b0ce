"""A job's configuration as the numbers that a plan is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from verl_mg.config import Config, CriticConfig, ReferenceConfig, TrainableConfig
from verl_mg.errors import UserError
from verl_mg.layout import parse_ranks

BESIDE = {
    "critic": "critic",
    "reward_model": "reward_model",
    "frozen_reward_model": "reward_model",
    "process_reward": "process_reward",
    "reference": "reference",
}
"""Roles beside the actor, and the sections that describe them."""
WITH_VALUE_HEAD = ("critic", "reward_model", "frozen_reward_model")
FROZEN = ("frozen_reward_model", "reference")


@dataclass(frozen=True)
class RoleRequest:
    """A role beside the actor. `model`: its own directory, where it has one."""

    name: str
    layout: str
    learns: bool
    micro_batch: int
    recompute: bool
    model: str | None = None
    ranks: tuple[int, ...] = ()
    offload: bool = False

    @property
    def head(self) -> Literal["language", "value"]:
        """What stands on top of it."""
        return "value" if self.name in WITH_VALUE_HEAD else "language"


@dataclass(frozen=True)
class PlanRequest:
    """What a configuration says; nothing, without one. `setting`: fields of a `Setting` by name."""

    model: str | None = None
    train: str | None = None
    rollout: str | None = None
    roles: tuple[RoleRequest, ...] = ()
    setting: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sharding_table: Path | None = None
    """Traced table of the rollout engine (`rollout.sharding_table`)."""


def plan_request(config: Config, roles: set[str]) -> PlanRequest:
    """Of the roles that the recipe asks for. UserError naming the key where there is nothing to plan."""
    _check(config, roles)
    actor, rollout, algorithm = config.actor, config.rollout, config.algorithm
    sequence = config.data.max_prompt_tokens + rollout.max_new_tokens
    setting = {
        "sequence": sequence,
        "micro_batch": actor.tokens_per_micro_batch,
        "recompute": actor.recompute,
        "minibatches": getattr(algorithm, "minibatches", 1),
        "epochs": getattr(algorithm, "epochs", 1),
        "rollout_ranks": rollout.num_ranks,
        "memory_fraction": rollout.memory_fraction,
        "max_running_requests": rollout.max_running_requests,
        "role_ranks": parse_ranks(actor.ranks) if actor.ranks else (),
        "offload": actor.offload,
        "sleep": rollout.sleep,
    }
    if prompts := getattr(algorithm, "prompts_per_iteration", None):
        setting["batch"] = prompts * getattr(algorithm, "group_size", 1) * sequence
    others = tuple(_role(name, getattr(config, section)) for name, section in BESIDE.items() if name in roles)
    notes = tuple(_notes(config, {"actor": "actor", **BESIDE}, roles))
    return PlanRequest(
        str(config.model.path), actor.layout, rollout.layout, others, setting, notes, rollout.sharding_table
    )


def _check(config: Config, roles: set[str]) -> None:
    if "rollout" not in roles:
        raise UserError("the recipe draws no samples, and a plan is of training and rollout; name one that does")
    if config.rollout.engine != "sglang":
        raise UserError(
            f"rollout.engine={config.rollout.engine}: a plan is of SGLang's engines; write rollout.engine=sglang"
        )
    if config.rollout.urls:
        raise UserError("rollout.urls: servers that run elsewhere are not planned; leave them out of the plan")
    if config.model.dtype != "bfloat16":
        raise UserError(f"model.dtype={config.model.dtype}: a plan counts bf16; write model.dtype=bfloat16")


def _notes(config: Config, sections: dict[str, str], roles: set[str]) -> Iterator[str]:
    """What a plan does not see."""
    for name, section in sections.items():
        own = getattr(config, section)
        if name in roles and name not in FROZEN and own.lora:
            yield f"{name}.lora: counted as if all weights were trained"
        if name in roles and name not in FROZEN and own.optimizer.cpu_offload:
            yield f"{name}.optimizer.cpu_offload: counted as if the moments were on the device"
        if name in roles and own.dynamic_context:
            yield f"{name}.dynamic_context: counted as if every row were cut over all context-parallel ranks"
    if getattr(config.algorithm, "one_step_off", False):
        yield "algorithm.one_step_off: counted as if samples were drawn before training, not beside it"


def _role(name: str, section: TrainableConfig | ReferenceConfig) -> RoleRequest:
    path = section.path if isinstance(section, CriticConfig | ReferenceConfig) else None
    learns = name not in FROZEN
    recompute = learns and isinstance(section, TrainableConfig) and section.recompute
    return RoleRequest(
        name,
        section.layout,
        learns,
        section.tokens_per_micro_batch,
        recompute,
        str(path) if path else None,
        parse_ranks(section.ranks) if section.ranks else (),
        section.offload,
    )
