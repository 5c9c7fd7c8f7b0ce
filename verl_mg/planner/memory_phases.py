"""What stands on a device together: in training, while samples are drawn, and in the weight sync between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from verl_mg.planner.inputs import GIB, PlanInputs
from verl_mg.planner.memory import ACTIVATIONS, RolloutMemory, TrainMemory

Parts = dict[tuple[str, str], float]
"""Bytes of a device by role and part, such as critic and gradients."""


@dataclass(frozen=True)
class _Resident:
    """A role's parts on one rank, and whether it waits on the host while others compute."""

    name: str
    parts: Mapping[str, float]
    offload: bool

    @property
    def states(self) -> Parts:
        """Without what stands only while it computes."""
        return {(self.name, part): size for part, size in self.parts.items() if part != ACTIVATIONS}

    @property
    def computing(self) -> Parts:
        """All of it."""
        return {(self.name, part): size for part, size in self.parts.items()}

    @property
    def serving(self) -> Parts:
        """What a weight sync reads, if the rest can wait on the host."""
        return {("actor", "weights"): self.parts["weights"]} if self.offload else self.states


Rank = tuple[_Resident, ...]


def training(setting: PlanInputs, train: TrainMemory | None) -> Parts:
    """On the fullest rank, while one of its roles computes and those that are offloaded wait on the host."""
    return _fullest(_staying(rank, besides=role) | role.computing for rank in _ranks(setting, train) for role in rank)


def at_rest(setting: PlanInputs, train: TrainMemory | None) -> Parts:
    """All that the roles keep, on the fullest rank, while none computes and none has left."""
    return _fullest(_together(role.states for role in rank) for rank in _ranks(setting, train))


def awake(setting: PlanInputs, train: TrainMemory | None) -> Parts:
    """What stays on the fullest of the engines' ranks while samples are drawn."""
    return {} if setting.rollout_ranks else _fullest(map(_staying, _ranks(setting, train)))


def syncing(setting: PlanInputs, train: TrainMemory | None) -> Parts:
    """The same while the actor's weights move to the engines."""
    serving = (
        _staying(rank) | _together(role.serving for role in rank if role.name == "actor")
        for rank in _ranks(setting, train)
    )
    return {} if setting.rollout_ranks else _fullest(serving)


def engine_limit(setting: PlanInputs, train: TrainMemory | None = None) -> float:
    """Bytes of a device for the weights and the cache of an engine, beside the other roles.

    SGLang takes its share of what is free when it starts, and it starts while all roles, the actor too, are there.
    """
    limit = setting.usable - _total(awake(setting, train))
    return min(limit, _share(setting, train)) if setting.memory_fraction else limit


def _share(setting: PlanInputs, train: TrainMemory | None) -> float:
    there = 0.0 if setting.rollout_ranks else _total(at_rest(setting, train))
    return setting.memory_fraction * (setting.memory * GIB - there)


def _ranks(setting: PlanInputs, train: TrainMemory | None) -> list[Rank]:
    """The ranks that hold networks, one of each kind: of equal roles at equal stages."""
    roles = [("actor", setting.standing, train.parts, setting.offload)] if train else []
    roles += [(role.name, role.ranks, role.parts, role.offload) for role in setting.beside]
    stages: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, (_, ranks, parts, _) in enumerate(roles):
        each = len(ranks) // len(parts["weights"])
        for index, rank in enumerate(ranks):
            stages[rank].append((number, index // each))
    kinds = dict.fromkeys(tuple(own) for own in stages.values())
    return [tuple(_resident(*roles[number], stage) for number, stage in kind) for kind in kinds]


def _resident(
    name: str, ranks: tuple[int, ...], parts: Mapping[str, tuple[int, ...]], offload: bool, stage: int
) -> _Resident:
    return _Resident(name, {part: float(sizes[stage]) for part, sizes in parts.items()}, offload)


def _staying(rank: Rank, besides: _Resident | None = None) -> Parts:
    return _together(role.states for role in rank if not role.offload and role is not besides)


def _together(parts: Iterable[Parts]) -> Parts:
    return {key: size for part in parts for key, size in part.items()}


def _fullest(ranks: Iterable[Parts]) -> Parts:
    return max(ranks, key=_total, default={})


def problem(setting: PlanInputs, train: TrainMemory | None, rollout: RolloutMemory | None) -> str | None:
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
        parts = syncing(setting, train) | {("engine", "weights"): float(max(rollout.weights))}
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
