"""The roles beside the actor: a critic learns as the actor does, a reference only judges."""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl_mg.errors import UserError
from verl_mg.layout import Layout
from verl_mg.paper.cost import train_seconds
from verl_mg.paper.memory import frozen_memory, train_memory
from verl_mg.paper.setting import Beside, Setting
from verl_mg.weights import WeightTable


@dataclass(frozen=True)
class Role:
    """A role as a job describes it. `learns`: it has gradients and an optimizer."""

    name: str
    layout: str
    weights: WeightTable
    learns: bool
    micro_batch: int
    recompute: bool = True


def beside(setting: Setting, role: Role) -> Beside:
    """What the role costs on the setting's training ranks. UserError naming it where its layout does not fit."""
    own = replace(setting, weights=role.weights, micro_batch=role.micro_batch, recompute=role.recompute)
    try:
        layout = fitted(own, Layout.parse(role.layout))
    except UserError as error:
        raise UserError(f"{role.name}: {error}") from None
    if role.learns:
        return Beside(role.name, layout, train_memory(own, layout).parts, train_seconds(own, layout))
    return Beside(role.name, layout, frozen_memory(own, layout).parts, 0.0)


def fitted(setting: Setting, layout: Layout) -> Layout:
    """The layout on all training ranks. UserError naming what it does not divide."""
    on_ranks = layout.fit(setting.training_ranks)
    setting.weights.check(on_ranks)
    on_ranks.check_context(setting.weights.config.heads)
    return on_ranks
