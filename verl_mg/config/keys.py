"""Keys of the configuration: which exist, which is nearest to an unknown one, and names of former versions.

actor.lr                   unknown; the key of this name within the section:  actor.optimizer.lr
actor.layuot               unknown; a similar name in the section:            actor.layout
data.train.math.wieght     unknown; NAME stands for math:                     data.train.math.weight
rollout.update             renamed:                                           rollout.weight_transfer
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel

NAME = "NAME"
"""Placeholder for names that the user chooses, such as the sources of `data.train`."""

RENAMED_KEYS = {
    "actor.optimizer.on_host": "actor.optimizer.cpu_offload",
    "algorithm.aggregation": "algorithm.loss_aggregation",
    "algorithm.correction": "algorithm.off_policy.correction",
    "algorithm.correction_high": "algorithm.off_policy.high",
    "algorithm.correction_low": "algorithm.off_policy.low",
    "algorithm.epochs": "algorithm.num_epochs",
    "algorithm.kind": "algorithm.loss_type",
    "algorithm.kl_coefficient": "algorithm.kl.coefficient",
    "algorithm.kl_horizon": "algorithm.kl.horizon",
    "algorithm.kl_in": "algorithm.kl.placement",
    "algorithm.kl_kind": "algorithm.kl.estimator",
    "algorithm.kl_target": "algorithm.kl.target",
    "algorithm.minibatches": "algorithm.num_minibatches",
    "algorithm.normalize_std": "algorithm.normalize_by_std",
    "algorithm.one_step_off": "rollout.mode",
    "algorithm.oversampling": "rollout.extra_prompts",
    "algorithm.replay": "algorithm.buffer_samples",
    "algorithm.buffer_iterations": "algorithm.buffer_samples",
    "algorithm.reward_model": "reward.from_model",
    "algorithm.rounds": "algorithm.max_sampling_rounds",
    "critic.optimizer.on_host": "critic.optimizer.cpu_offload",
    "data.curriculum.threshold": "data.curriculum.pass_threshold",
    "data.too_long": "data.overlong_prompts",
    "evaluation.passed": "evaluation.pass_threshold",
    "job.lost_after": "job.heartbeat_timeout_s",
    "job.samples": "record.samples_per_rank",
    "job.stalled_after": "job.stall_timeout_s",
    "process_reward.optimizer.on_host": "process_reward.optimizer.cpu_offload",
    "profile.exact": "profile.synchronize",
    "reward_model.optimizer.on_host": "reward_model.optimizer.cpu_offload",
    "rollout.max_batch": "rollout.max_running_requests",
    "rollout.partial": "rollout.partial_rollout",
    "rollout.prefetch": "rollout.mode",
    "rollout.ranks": "rollout.num_ranks",
    "rollout.request_timeout": "rollout.request_timeout_s",
    "rollout.tool_format": "rollout.tool_call_parser",
    "rollout.tool_timeout": "rollout.tool_timeout_s",
    "rollout.update": "rollout.weight_transfer",
    "track.name": "tracking.name",
    "track.project": "tracking.project",
    "track.to": "tracking.services",
    "track": "tracking",
}
"""Keys of version 0.1.0 before they got the field's standard names, and the keys that replace them."""

RENAMED_VALUES = {
    "rollout.engine": {"embedded": "hf"},
    "rollout.weight_transfer": {"group": "process_group"},
}
"""Values of version 0.1.0, by today's key, and the values that replace them."""


def subsection(annotation: Any) -> tuple[str, type[BaseModel]] | None:
    """Returns the section that a field's type contains, after the part of the key before it; None without a section.

    ("", GuardConfig) for `GuardConfig`, ("NAME.", SourceConfig) for `Path | dict[str, SourceConfig]`.
    """
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return "", kind
        if get_origin(kind) is dict and (inner := subsection(get_args(kind)[1])):
            return f"{NAME}.{inner[0]}", inner[1]
    return None


def known_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Returns all dotted keys of a section, subsections included, with NAME for names that the user chooses."""
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        # The key of a section is a key too: an override may give a whole mapping.
        if inner := subsection(field.annotation):
            keys += known_keys(inner[1], f"{prefix}{name}.{inner[0]}")
    return keys


def key_problem(tree: Mapping[str, Any], config: type[BaseModel]) -> str:
    """Returns what is wrong with the first unknown or renamed key, with the remedy; "" if all keys are known."""
    for key, value in _unknown(tree, config):
        if renamed := _renamed(key, value, config):
            return renamed
        return f"{key}: unknown key. {_remedy(key, config)}"
    for key, values in RENAMED_VALUES.items():
        value = _lookup(tree, key)
        if isinstance(value, str) and value in values:
            return f"{key}={value}: renamed to {key}={values[value]}. Write the new name."
    return ""


def _unknown(tree: Any, section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields unknown keys with their values. Values of a wrong type are left to validation."""
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        key = f"{prefix}{name}"
        if name not in section.model_fields:
            yield key, value
        elif inner := subsection(section.model_fields[name].annotation):
            by_name, kind = inner
            if not by_name:
                yield from _unknown(value, kind, f"{key}.")
            elif isinstance(value, Mapping):
                for chosen, part in value.items():
                    yield from _unknown(part, kind, f"{key}.{chosen}.")


def _renamed(key: str, value: Any, config: type[BaseModel]) -> str:
    """Returns the error for a key of a former version, or ""."""
    # A renamed section is unknown as a whole, but its keys may have got more specific names.
    children = [f"{key}.{name}" for name in value] if isinstance(value, Mapping) else []
    for former in (*children, key):
        new = RENAMED_KEYS.get(former)
        # A recipe without the new key never had the former one.
        if new in known_keys(config):
            if isinstance(value, str) and value in RENAMED_VALUES.get(new, {}):
                return f"{former}={value}: renamed to {new}={RENAMED_VALUES[new][value]}. Write the new name."
            return f"{former}: renamed to {new}. Write the new name."
    return ""


def _lookup(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _remedy(key: str, config: type[BaseModel]) -> str:
    """Returns the nearest key, sought in the section first and then in the whole tree, or all keys of the section."""
    # In this order: the name below the section, a similar one in it, the name elsewhere, a similar key anywhere.
    known = known_keys(config)
    parent, _, name = key.rpartition(".")
    generic = _generic(parent, known)
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == generic}
    similar = [siblings[match] for match in difflib.get_close_matches(name, siblings, 1)]
    elsewhere = [k for k in known if k.rpartition(".")[2] == name]
    within = [k for k in elsewhere if k.startswith(f"{parent}.")]
    if nearest := within or similar or elsewhere or difflib.get_close_matches(key, known, 1):
        return f"Did you mean {nearest[0].replace(generic, parent, 1) if generic else nearest[0]}?"
    return f"{parent or 'The top level'} has the keys {', '.join(siblings)}."


def _generic(parent: str, known: list[str]) -> str:
    """Returns a section's key with NAME for the names that the user chose, as in `data.train.NAME`."""
    parts = parent.split(".")
    for i in range(len(parts)):
        candidate = ".".join([*parts[:i], NAME, *parts[i + 1 :]])
        if any(k.startswith(f"{candidate}.") for k in known):
            return candidate
    return parent
