"""Keys that have an effect only with others: without these, another value than the default is refused.

    Needs("rollout", "max_turns tool_timeout_s", lambda c: c.rollout.tools, "there are no tools. Set rollout.tools")

Keys that depend on their own section are refused there, and those that depend on ranks or an engine in `checks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel

from verl_mg.config.roles import RoleSection
from verl_mg.config.tree import Config
from verl_mg.errors import UserError


class Needs(NamedTuple):
    """Keys of one section, and when they have an effect."""

    section: str
    keys: str
    condition: Callable[[Config], object]
    missing: str  # why they have none, and what to write


def _has_cp(role: str, config: Config) -> bool:
    return config.section(role).parallel_sizes.cp > 1


def _decays(role: str, config: Config) -> bool:
    return config.section(role).optimizer.schedule != "constant"


def _has_ratio(role: str, config: Config) -> bool:
    return config.section(role).optimizer.warmup_ratio is not None or _decays(role, config)


def _has_engine(name: str, config: Config) -> bool:
    return config.rollout.engine == name


# Sections of the roles with a model; a teacher has the name that its user chooses.
MODELS = tuple(
    name
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, RoleSection)
)
TRAINED = tuple(name for name in MODELS if name != "reference")
# Not the reference: its section is kept where a penalty is turned off by its coefficient.
ROLES = (*(name for name in MODELS if name not in ("actor", "reference")), "teachers")
AGENTS = (
    "agent_options agent_timeout_s agent_concurrency agent_retries agent_failure_reward agent_trained agent_names "
    "agent_host"
)
NEEDS = (
    Needs("rollout", "max_turns tool_timeout_s", lambda c: c.rollout.tools, "there are no tools. Set rollout.tools"),
    Needs("rollout", "tool_call_parser reasoning_parser", lambda c: c.rollout.tools or c.rollout.has_agents,
          "neither tools nor agents read replies. Set rollout.tools or rollout.agent"),
    Needs("rollout", AGENTS, lambda c: c.rollout.has_agents, "no agent makes the samples. Set rollout.agent"),
    Needs("rollout", "max_staleness stale keep_kv_cache", lambda c: c.rollout.mode == "async",
          "weights never reach requests in flight. Set rollout.mode=async"),
    *(
        Needs("rollout", name, partial(_has_engine, name),
              f"these are arguments of another engine. Set rollout.engine={name}")
        for name in ("vllm", "sglang")
    ),
    Needs("rollout", "python", lambda c: c.rollout.has_processes and not c.rollout.has_servers,
          "the job starts no process of an engine. Set rollout.engine=sglang or vllm"),
    Needs("rollout", "layout", lambda c: c.rollout.has_processes,
          "the engine hf has the layout of the actor. Set rollout.engine=sglang or vllm"),
    Needs("rollout", "memory_fraction", lambda c: c.rollout.has_processes and not c.rollout.has_servers,
          "the job starts no engine that reserves memory. Set rollout.engine=sglang or vllm"),
    Needs("rollout", "sleep", lambda c: c.rollout.has_processes and not c.rollout.has_servers
          and not c.rollout.num_ranks, "no engine shares the memory of training. Set rollout.engine=sglang or vllm"),
    Needs("rollout", "api_key_env admin_key_env weight_transfer", lambda c: c.rollout.has_servers,
          "the job starts its engines itself. Set rollout.urls"),
    Needs("rollout", "shared_folder", lambda c: c.rollout.has_servers and c.rollout.weight_transfer == "disk",
          "weights do not travel through files. Set rollout.weight_transfer=disk and rollout.urls"),
    Needs("evaluation", "every prompts samples temperature top_p max_new_tokens stop k pass_threshold",
          lambda c: c.data.test is not None, "there is nothing to evaluate on. Set data.test"),
    Needs("data.curriculum", "revisit pass_threshold decay", lambda c: c.data.curriculum.low > 0
          or c.data.curriculum.high < 1, "no prompt is left out. Set data.curriculum.low or high"),
    Needs("reward", "function options mixture weights_file workers", lambda c: not c.reward.from_model,
          "reward.from_model=true runs no reward functions. Set reward.from_model=false"),
    Needs("reward", "function", lambda c: not c.reward.mixture,
          "the rewards of reward.mixture replace it. Write it as one of them"),
    Needs("actor.guard", "action", lambda c: c.actor.guard.max_kl is not None,
          "no divergence is too large. Set actor.guard.max_kl"),
    Needs("algorithm", "support", lambda c: c.rollout.limits_draws,
          "every token can be drawn. Set rollout.top_p, top_k or min_p"),
    Needs("algorithm.kl", "placement estimator target horizon min_coefficient max_coefficient",
          lambda c: c.algorithm.kl.enabled, "there is no penalty. Set algorithm.kl.coefficient"),
    Needs("algorithm.kl", "horizon", lambda c: c.algorithm.kl.target, "nothing is adapted. Set algorithm.kl.target"),
    *(
        Needs(role, "dynamic_context", partial(_has_cp, role), "its layout divides no rows. Set layout=cp2 there")
        for role in MODELS
    ),
    *(
        row
        for role in TRAINED
        for row in (
            Needs(f"{role}.optimizer", "min_lr", partial(_decays, role), "the rate is constant. Set schedule there"),
            Needs(f"{role}.optimizer", "decay_steps", partial(_has_ratio, role),
                  "the rate is constant. Set schedule there"),
        )
    ),
    Needs("tracking", "project samples", lambda c: c.tracking.services,
          "no service receives it. Set tracking.services"),
    Needs("tracking", "prometheus_host", lambda c: c.tracking.prometheus_port is not None,
          "no port is open. Set tracking.prometheus_port"),
    Needs("profile", "ranks memory", lambda c: c.profile.iterations,
          "no iteration is traced. Set profile.iterations"),
)  # fmt: skip


def check_effects(config: Config, roles: Collection[str]) -> None:
    """Raises UserError for the first key of a job without effect, whose recipe requests `roles`."""
    for key, reason in without_effect(config, roles):
        raise UserError(f"{key}: it has no effect, since {reason}, or leave it out.")


def without_effect(config: Config, roles: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields each key, not at its default, without effect, with the reason and what to write instead."""
    for section, keys, condition, missing in NEEDS:
        values: Any = config
        defaults: Any = None
        for name in section.split("."):
            # Of the recipe, whose subsections can be other ones or have other defaults than their classes.
            defaults = _default(values, name) if hasattr(values, name) else None
            values = getattr(values, name, None)
        if values is None or condition(config):
            continue
        changed = set(_differing(values, defaults))
        yield from ((f"{section}.{name}", missing) for name in keys.split() if name in changed)
    built = {*roles, "reward_model"} if config.reward.from_model else {*roles}
    for name in _differing(config):
        if name in ROLES and name not in built:
            yield name, "the recipe builds no such role. Choose another recipe"
    support = getattr(config.algorithm, "support", "sampled")
    if support != "sampled" and "rollout" not in built:
        yield "algorithm.support", "the recipe samples nothing. Choose another recipe"
    if support == "policy" and not built & {"reference", "process_reward", "teachers"}:
        yield "algorithm.support", "no other model scores the tokens of the policy. Write sampled"
    sections = [getattr(config, name) for name in MODELS if name in built]
    backends = {section.backend for section in (*sections, *config.teachers.values())}
    backends |= {config.reference.backend} if "teachers" in built else set()
    for name in get_args(RoleSection.model_fields["backend"].annotation):
        for key in _differing(getattr(config, name)) if name not in backends else ():
            yield f"{name}.{key}", f"no role has this backend. Set actor.backend={name}"


def _default(section: BaseModel, name: str) -> Any:
    return type(section).model_fields[name].get_default(call_default_factory=True)


def _differing(section: BaseModel, defaults: BaseModel | None = None) -> Iterator[str]:
    """Yields the keys of a section that differ from `defaults`, or from its class."""
    for name, field in type(section).model_fields.items():
        default = getattr(defaults, name) if defaults else _default(section, name)
        if not field.is_required() and getattr(section, name) != default:
            yield name
