"""The roles beside the actor: a critic learns as the actor does, a reference only judges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from verl_mg.errors import UserError
from verl_mg.layout import Layout
from verl_mg.layout.suggest import resolve_layout
from verl_mg.planner.cost import inference_seconds, train_seconds
from verl_mg.planner.inputs import AuxiliaryRole, PlanInputs
from verl_mg.planner.memory import frozen_memory, train_memory
from verl_mg.sharding.weight_table import WeightTable


@dataclass(frozen=True)
class PlannedRole:
    """A role as a job describes it.

    `learns`: it has gradients and an optimizer. `ranks`: of the job; empty: all that hold networks.
    """

    name: str
    layout: str
    weights: WeightTable
    learns: bool
    micro_batch: int
    recompute: bool = True
    ranks: tuple[int, ...] = ()
    offload: bool = False


def auxiliary_role(setting: PlanInputs, role: PlannedRole) -> AuxiliaryRole:
    """What the role costs on its ranks. UserError naming it where its layout does not fit."""
    changes: dict[str, Any] = {"weights": role.weights, "micro_batch": role.micro_batch, "recompute": role.recompute}
    try:
        own = replace(setting, **changes, role_ranks=role.ranks)
        layout = fit_layout(own, Layout.parse(role.layout))
    except UserError as error:
        raise UserError(f"{role.name}: {error}") from None
    parts = train_memory(own, layout).parts if role.learns else frozen_memory(own, layout).parts
    seconds = train_seconds(own, layout) if role.learns else 0.0
    return AuxiliaryRole(role.name, layout, parts, seconds, inference_seconds(own, layout), own.standing, role.offload)


def fit_layout(setting: PlanInputs, layout: Layout) -> Layout:
    """The layout on all ranks of the role. UserError naming what it does not divide, and the nearest that work."""
    ranks, experts = len(setting.standing), setting.weights.model_dims.experts
    return resolve_layout(layout, ranks, experts, partial(check, setting))


def check(setting: PlanInputs, layout: Layout) -> None:
    """UserError naming what a layout of the role's ranks does not divide."""
    setting.weights.check_layout(layout)
    layout.check_context(setting.weights.config.heads)
