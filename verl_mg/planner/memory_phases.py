"""Bytes that are on a device at the same time: at the start, in training, generation and the weight sync between.

phase          on the device of a rank with actor, critic and engine; everything is offloaded, engines sleep
build          a role that is allocated, before it is offloaded
training       the role that computes, with its activations
weight sync    the actor's weights, the engine's weights
generation     the engine's weights and KV cache
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from verl_mg.planner.inputs import GIB, TRANSIENT, PlanInputs
from verl_mg.planner.memory import RolloutMemory, TrainMemory

Parts = dict[tuple[str, str], float]  # bytes of a device by role and part, such as critic and gradients


@dataclass(frozen=True)
class _Resident:
    """Memory of a role on one rank, and whether it is offloaded while other roles compute."""

    name: str
    parts: Mapping[str, float]
    offload: bool

    @property
    def states(self) -> Parts:
        """Parts that exist while it does not compute."""
        return {(self.name, part): size for part, size in self.parts.items() if part not in TRANSIENT}

    @property
    def computing(self) -> Parts:
        """All parts, activations included."""
        return {(self.name, part): size for part, size in self.parts.items()}

    @property
    def sync_source(self) -> Parts:
        """Parts that are on the device in a weight sync: only weights if the role can be offloaded."""
        return {("actor", "weights"): self.parts["weights"]} if self.offload else self.states


Rank = tuple[_Resident, ...]


def training(inputs: PlanInputs, train: TrainMemory | None) -> Parts:
    """Returns the parts on the fullest rank while one of its roles computes and offloaded ones are on the host."""
    return _fullest(
        _resident_parts(rank, excluding=role) | role.computing for rank in _ranks(inputs, train) for role in rank
    )


def awake(inputs: PlanInputs, train: TrainMemory | None) -> Parts:
    """Returns the parts of roles on the fullest of the engines' ranks during generation."""
    return {} if inputs.rollout_ranks else _fullest(map(_resident_parts, _ranks(inputs, train)))


def syncing(inputs: PlanInputs, train: TrainMemory | None) -> Parts:
    """Returns the parts of roles on the fullest of the engines' ranks during a weight sync."""
    by_rank = (
        _resident_parts(rank) | _merged(role.sync_source for role in rank if role.name == "actor")
        for rank in _ranks(inputs, train)
    )
    return {} if inputs.rollout_ranks else _fullest(by_rank)


def phases(inputs: PlanInputs, train: TrainMemory | None, rollout: RolloutMemory) -> dict[str, float]:
    """Returns the bytes on the fullest rank of each phase, without the KV cache, which has what is left."""
    weights, built = float(max(rollout.weights)), _ranks(inputs, train)
    states = (_resident_parts(rank, excluding=role) | role.states for rank in built for role in rank)
    sizes = {"build": _total(_fullest(states)), "training": _total(training(inputs, train))}
    sizes["generation"] = _total(awake(inputs, train)) + weights
    if not inputs.rollout_ranks:
        sizes["weight sync"] = _total(syncing(inputs, train)) + weights
    return sizes


def engine_limit(inputs: PlanInputs, train: TrainMemory | None = None) -> float:
    """Computes the bytes of a device for weights and KV cache of an engine, in addition to the other roles."""
    # An engine takes a fraction of the memory that is free when it starts. Then offloaded roles are on the host, and
    # the others have everything that they keep, Adam's moments too.
    # Without a fraction, an engine takes what roles that stay on the device leave.
    limit = inputs.usable - _total(awake(inputs, train))
    return min(limit, _engine_fraction(inputs, train)) if inputs.memory_fraction else limit


def _engine_fraction(inputs: PlanInputs, train: TrainMemory | None) -> float:
    return inputs.memory_fraction * (inputs.memory * GIB - _total(awake(inputs, train)))


def _ranks(inputs: PlanInputs, train: TrainMemory | None) -> list[Rank]:
    """Returns the distinct model ranks: ranks with the same roles at the same stages are listed once."""
    # A stage has consecutive ranks of the role: pp is the slowest coordinate of a layout.
    roles = [("actor", inputs.placement_ranks, train.parts, inputs.offload)] if train else []
    roles += [(role.name, role.ranks, role.parts, role.offload) for role in inputs.auxiliary_roles]
    stages: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, (_, ranks, parts, _) in enumerate(roles):
        each = len(ranks) // len(parts["weights"])
        for index, rank in enumerate(ranks):
            stages[rank].append((number, index // each))
    distinct = dict.fromkeys(tuple(on_rank) for on_rank in stages.values())

    def resident(number: int, stage: int) -> _Resident:
        name, _, parts, offload = roles[number]
        return _Resident(name, {part: float(sizes[stage]) for part, sizes in parts.items()}, offload)

    return [tuple(resident(*of_role) for of_role in on_rank) for on_rank in distinct]


def _resident_parts(rank: Rank, excluding: _Resident | None = None) -> Parts:
    return _merged(role.states for role in rank if not role.offload and role is not excluding)


def _merged(parts: Iterable[Parts]) -> Parts:
    return {key: size for part in parts for key, size in part.items()}


def _fullest(ranks: Iterable[Parts]) -> Parts:
    return max(ranks, key=_total, default={})


def problem(inputs: PlanInputs, train: TrainMemory | None, rollout: RolloutMemory | None) -> str | None:
    """Describes the phase that does not fit the device, with its largest part; None where all phases fit."""
    if train:
        parts = training(inputs, train)
        if rollout and not inputs.sleep and not inputs.rollout_ranks:
            parts |= {("engine", "weights and cache"): engine_limit(inputs, train)}  # never released
        if _total(parts) > inputs.usable:
            return _too_large("training", parts, inputs.usable)
    if rollout:
        cache = f"the KV cache of one sample of {inputs.sequence} tokens"
        parts = {
            ("engine", "weights"): float(max(rollout.weights)),
            ("engine", cache): float(inputs.sequence * max(rollout.per_token)),
        }
        others = awake(inputs, train)
        if _total(parts | others) > inputs.usable:
            return _too_large("generation", parts | others, inputs.usable)
        if inputs.memory_fraction and _total(parts) > _engine_fraction(inputs, train):
            return _too_large("generation", parts, _engine_fraction(inputs, train)) + (
                f"; engines take {inputs.memory_fraction:g} of the memory that is free when they start"
            )
    if train and rollout and not inputs.rollout_ranks:
        parts = syncing(inputs, train) | {("engine", "weights"): float(max(rollout.weights))}
        if _total(parts) > inputs.usable:
            return _too_large("the weight sync", parts, inputs.usable)
    return None


def _too_large(phase: str, parts: Parts, limit: float) -> str:
    role, part = max(parts, key=lambda key: parts[key])
    sums = {name: sum(size for key, size in parts.items() if key[0] == name) for name, _ in parts}
    by_role = f" ({', '.join(f'{name} {_gib(size)}' for name, size in sums.items())})" if len(sums) > 1 else ""
    what = part if part.startswith("the ") else f"the {role}'s {part}"
    return (
        f"{phase}: it needs {_gib(_total(parts))} GiB on a rank and has {_gib(limit)}{by_role}; "
        f"{_gib(parts[role, part])} GiB of that is {what}"
    )


def _total(parts: Parts) -> float:
    return sum(parts.values())


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}"
