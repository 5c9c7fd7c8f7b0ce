"""What stands on a device together: in training, while samples are drawn, and in the weight sync between them."""

from __future__ import annotations

import math

from verl_mg.paper.memory import ACTIVATIONS, RolloutMemory, TrainMemory
from verl_mg.paper.setting import GIB, Setting

Parts = dict[tuple[str, str], float]
"""Bytes of a device by role and part, such as critic and gradients."""


def training(setting: Setting, train: TrainMemory | None) -> Parts:
    """On the fullest rank; all roles are there, and one of them computes."""
    return max(_segments(setting, train), key=_total)


def at_rest(setting: Setting, train: TrainMemory | None) -> Parts:
    """The same while no role computes."""
    return max((_states(parts) for parts in _segments(setting, train)), key=_total)


def awake(setting: Setting, train: TrainMemory | None) -> Parts:
    """What stays on the fullest of the engines' ranks while samples are drawn."""
    if setting.rollout_ranks:
        return {}
    return at_rest(setting, None if setting.offload else train)


def engine_limit(setting: Setting, train: TrainMemory | None = None) -> float:
    """Bytes of a device for the weights and the cache of an engine, beside the other roles.

    SGLang takes its share of what is free when it starts, and it starts while all roles, the actor too, are there.
    """
    limit = setting.usable - _total(awake(setting, train))
    return min(limit, _share(setting, train)) if setting.memory_fraction else limit


def _share(setting: Setting, train: TrainMemory | None) -> float:
    there = 0.0 if setting.rollout_ranks else _total(at_rest(setting, train))
    return setting.memory_fraction * (setting.memory * GIB - there)


def _segments(setting: Setting, train: TrainMemory | None) -> list[Parts]:
    """Of each run of ranks that stand on the same stage of every role; pipelines are cut at even places."""
    roles = [("actor", train.parts)] if train else []
    roles += [(role.name, role.parts) for role in setting.beside]
    stages = {role: len(parts["weights"]) for role, parts in roles}
    runs = math.lcm(*stages.values())
    each = [(role, part, sizes) for role, parts in roles for part, sizes in parts.items()]
    return [
        _one_computes({(role, part): float(sizes[run * stages[role] // runs]) for role, part, sizes in each})
        for run in range(runs)
    ]


def _one_computes(parts: Parts) -> Parts:
    """Roles take turns: of their activations only the largest count."""
    working = {key: size for key, size in parts.items() if key[1] == ACTIVATIONS}
    if not working:
        return parts
    largest = max(working, key=lambda key: working[key])
    return _states(parts) | {largest: working[largest]}


def _states(parts: Parts) -> Parts:
    return {key: size for key, size in parts.items() if key[1] != ACTIVATIONS}


def problem(setting: Setting, train: TrainMemory | None, rollout: RolloutMemory | None) -> str | None:
    """Which phase of the job is too large for the device and by which part, or None where it fits."""
    if train:
        parts = training(setting, train)
        if rollout and not setting.sleep and not setting.rollout_ranks:
            parts |= {("engine", "weights and cache"): engine_limit(setting, train)}
        if _total(parts) > setting.usable:
            return _too_large("training", parts, setting.usable)
    if rollout:
        cache = f"the KV cache of one sample of {setting.sequence} tokens"
        parts = {
            ("engine", "weights"): float(max(rollout.weights)),
            ("engine", cache): float(setting.sequence * max(rollout.per_token)),
        }
        beside = awake(setting, train)
        if _total(parts | beside) > setting.usable:
            return _too_large("generation", parts | beside, setting.usable)
        if setting.memory_fraction and _total(parts) > _share(setting, train):
            return _too_large("generation", parts, _share(setting, train)) + (
                f"; engines take {setting.memory_fraction:g} of what is free when they start"
            )
    if train and rollout and not setting.rollout_ranks:
        parts = at_rest(setting, train) | {("engine", "weights"): float(max(rollout.weights))}
        if _total(parts) > setting.usable:
            return _too_large("the weight sync", parts, setting.usable)
    return None


def _too_large(phase: str, parts: Parts, limit: float) -> str:
    role, part = max(parts, key=lambda key: parts[key])
    sums = {name: sum(size for key, size in parts.items() if key[0] == name) for name, _ in parts}
    told = f" ({', '.join(f'{name} {_gib(size)}' for name, size in sums.items())})" if len(sums) > 1 else ""
    what = part if part.startswith("the ") else f"the {role}'s {part}"
    return (
        f"{phase} needs {_gib(_total(parts))} GiB on a rank and has {_gib(limit)}{told}; "
        f"{_gib(parts[role, part])} GiB of that are {what}"
    )


def _total(parts: Parts) -> float:
    return sum(parts.values())


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}"
