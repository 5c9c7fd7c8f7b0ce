"""Reads a configuration of verl: YAML as written or dumped by hydra, or the script that starts verl, and overrides.

run.sh      n=8; python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=$n  ─┐
config.yaml actor_rollout_ref: {rollout: {n: 8}}                                  ─┼─▶ {"aorr.rollout.n": 8}
overrides   actor_rollout_ref.rollout.n=8, also with + or ++ in front             ─┘
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from verl_mg.config.reading import apply_override, read_tree
from verl_mg.errors import UserError
from verl_mg.from_verl.shell import trainer_arguments

Given = dict[str, Any]  # {key of verl: value}

LONG, SHORT = "actor_rollout_ref.", "aorr."
FLOAT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
"""Numbers such as 1e-6, which hydra reads as numbers and YAML 1.1 as text."""
TRAINER = re.compile(r"(ppo|dapo)(_megatron)?_trainer")
"""Configurations of verl whose keys have verl's defaults."""
KEY = re.compile(r"\+{0,2}[A-Za-z_][^\s~@]*")
STRATEGY = "aorr.actor.strategy"
OLDER = (
    ("aorr.actor.grad_clip", "aorr.actor.optim.clip_grad"),
    ("aorr.actor.optim.warmup_style", "aorr.actor.optim.lr_scheduler_type"),
    ("aorr.actor.ulysses_sequence_parallel_size", "aorr.actor.fsdp_config.ulysses_sequence_parallel_size"),
    ("aorr.ref.ulysses_sequence_parallel_size", "aorr.ref.fsdp_config.ulysses_sequence_parallel_size"),
    ("aorr.actor.router_replay", "aorr.actor.megatron.router_replay"),
    ("aorr.ref.router_replay", "aorr.ref.megatron.router_replay"),
    ("critic.grad_clip", "critic.optim.clip_grad"),
    ("critic.optim.warmup_style", "critic.optim.lr_scheduler_type"),
    ("critic.ulysses_sequence_parallel_size", "critic.fsdp.ulysses_sequence_parallel_size"),
    ("critic.model.fsdp_config", "critic.fsdp"),
    ("custom_reward_function.overlong_buffer", "reward.reward_kwargs.overlong_buffer_cfg"),
    ("custom_reward_function", "reward.custom_reward_function"),
    ("reward_model.overlong_buffer", "reward.reward_kwargs.overlong_buffer_cfg"),
    ("reward_model.reward_kwargs", "reward.reward_kwargs"),
    ("reward_model.reward_manager", "reward.reward_manager.name"),
    ("reward_manager", "reward.reward_manager"),
    ("reward_model.model.path", "reward.reward_model.model_path"),
    ("reward_model.sandbox_fusion", "reward.sandbox_fusion"),
    ("reward_model.num_workers", "reward.num_workers"),
    ("reward_model", "reward.reward_model"),
    ("sandbox_fusion", "reward.sandbox_fusion"),
)
"""Keys, or sections, of earlier versions and their names in verl 0.9.1; the first that fits a key renames it."""


def read_verl(path: Path, overrides: list[str]) -> Given:
    """Returns what a file and overrides give, by key of verl; UserError where it is not a job of verl's PPO trainer."""
    if path.suffix == ".sh":
        tree: dict[str, Any] = {}
        overrides = trainer_arguments(path, overrides)
    else:
        tree = read_tree(path)
    engine = _engine(tree.pop("defaults", None))
    following = iter(overrides)
    for word in following:
        option, separator, value = word.partition("=")
        if option in ("--config-name", "-cn"):
            name = (value if separator else next(following, "")).removesuffix(".yaml")
            if not TRAINER.fullmatch(name):
                raise UserError(
                    f"{path}: {option}{separator or ' '}{name}: no trainer of verl. Give the file that hydra wrote."
                )
            engine = _engine([name]) or engine
        elif option == "model_engine":
            engine = value
        elif option == "--config-path" and value.removeprefix("./") == "config":
            pass  # verl's own, where its configurations are
        elif not separator or not KEY.fullmatch(option):
            raise UserError(
                f"{path}: {word}: not understood here. Give KEY=VALUE for each key; for another configuration, the "
                "file that hydra wrote."
            )
        else:
            apply_override(tree, word.lstrip("+"))
    if not isinstance(tree.get("actor_rollout_ref"), dict):
        raise UserError(
            f"{path}: no section actor_rollout_ref, so it is not a job of verl's PPO trainer. Give its YAML file, or "
            "the script with `python -m verl.trainer.main_ppo`."
        )
    given = _current_names({key.replace(LONG, SHORT): _number(value) for key, value in _leaves(tree)})
    if engine in ("megatron", "dp", "fsdp"):
        given.setdefault(STRATEGY, "megatron" if engine == "megatron" else "fsdp")
    elif any(key.startswith("aorr.actor.megatron.") for key in given):
        given.setdefault(STRATEGY, "megatron")  # a dump has the section of its engine only
    return given


def resolved(values: Mapping[str, Any], key: str, default: Mapping[str, Any], depth: int = 0) -> Any:
    """Returns the value of a key without interpolations such as ${data.max_prompt_length}."""
    value = values[key] if key in values else default.get(key)
    if isinstance(value, list):
        return [_filled(item, key, values, default, depth) for item in value]
    return _filled(value, key, values, default, depth)


INNERMOST = re.compile(r"\$\{((?:[^${}]|\{\})*)\}")


def _filled(value: Any, key: str, values: Mapping[str, Any], default: Mapping[str, Any], depth: int) -> Any:
    while isinstance(value, str) and (inside := INNERMOST.search(value)):
        if depth > 20:
            raise UserError(f"{key}: {value!r} refers to itself. Write a value.")
        inner = _referred(inside[1].strip(), key, values, default, depth)
        value = inner if inside[0] == value.strip() else value.replace(inside[0], str(inner))
    return value


def _referred(text: str, key: str, values: Mapping[str, Any], default: Mapping[str, Any], depth: int) -> Any:
    resolver, colon, arguments = text.partition(":")
    name, _, fallback = arguments.partition(",")
    if colon and resolver == "oc.env":
        if name.strip() in os.environ or fallback:
            return os.environ.get(name.strip(), _number(yaml.safe_load(fallback)))
        raise UserError(f"{key}: ${{{text}}} is not set in the environment. Set it, or write a value.")
    if colon and resolver != "oc.select":
        raise UserError(f"{key}: ${{{text}}} is computed by hydra. Give the file that hydra wrote, or the value.")
    target = (name if colon else text).strip()
    if target.startswith("."):
        target = f"{key.rpartition('.')[0]}{target}"
    target = target.replace(LONG, SHORT)
    if target in values or target in default:
        return resolved(values, target, default, depth + 1)
    if not colon:  # only oc.select has a value for a key that is not there
        raise UserError(f"{key}: ${{{text}}} refers to a key that the file does not have. Write a value.")
    return _number(yaml.safe_load(fallback or "null"))


def flat(tree: Mapping[str, Any]) -> Given:
    """Returns the values of a tree by dotted key."""
    return dict(_leaves(tree))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        elif name != "_target_":  # names a class of verl
            yield f"{prefix}{name}", value


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(item) for item in value]
    return float(value) if isinstance(value, str) and FLOAT.fullmatch(value) else value


def _engine(defaults: Any) -> str:
    """Returns the engine of hydra's list of defaults, or ""."""
    names = " ".join(map(str, defaults)) if isinstance(defaults, list) else ""
    return "megatron" if "megatron" in names else "fsdp" if "ppo_trainer" in names else ""


def _current_names(given: Given) -> Given:
    renamed: Given = {}
    for key, value in given.items():
        now = next((new + key[len(old) :] for old, new in OLDER if key == old or key.startswith(f"{old}.")), key)
        # An empty old name means that the new one counts: dumps of verl have both.
        if now == key or (value is not None and now not in given):
            renamed[now] = value
    return renamed
