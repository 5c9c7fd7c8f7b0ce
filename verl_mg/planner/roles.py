"""Auxiliary roles of a plan: a critic is trained like the actor, a reference only runs inference."""

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
from verl_mg.planner.module_memory import sharded_module
from verl_mg.planner.training_options import DEFAULT_OPTIONS, Recompute, TrainingOptions
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.weight_table import WeightTable


@dataclass(frozen=True)
class PlannedRole:
    """Auxiliary role as a job describes it."""

    name: str
    layout: Layout
    weights: ModelTable  # weight table of its model
    is_trained: bool  # whether it has gradients and an optimizer
    micro_batch: int  # tokens of a micro-batch
    recompute: Recompute = True  # parts of a layer computed again in the backward pass: all, none, or modules by name
    ranks: tuple[int, ...] = ()  # ranks of the job; empty: all model ranks
    offload: bool = False  # whether it is on the host while other roles compute
    options: TrainingOptions = DEFAULT_OPTIONS  # kernels, precision and overlap of training


def auxiliary_role(inputs: PlanInputs, role: PlannedRole) -> AuxiliaryRole:
    """Computes memory and predicted seconds of an auxiliary role."""
    # The inputs of the actor with the role's model, ranks and options: so the actor's functions compute any role.
    changes: dict[str, Any] = {"weights": role.weights, "micro_batch": role.micro_batch}
    changes |= {"recompute": role.recompute, "options": role.options}
    try:
        role_inputs = replace(inputs, **changes, role_ranks=role.ranks)
        layout = fit_layout(role_inputs, role.layout)
    except UserError as error:
        raise UserError(f"{role.name}: {error}") from None
    memory = train_memory(role_inputs, layout) if role.is_trained else frozen_memory(role_inputs, layout)
    return AuxiliaryRole(
        name=role.name,
        layout=layout,
        parts=memory.parts,
        update_seconds=train_seconds(role_inputs, layout) if role.is_trained else 0.0,
        inference_seconds=inference_seconds(role_inputs, layout),
        ranks=role_inputs.placement_ranks,
        offload=role.offload,
    )


def fit_layout(inputs: PlanInputs, layout: Layout) -> Layout:
    """Completes a layout to all ranks of the role; the UserError lists the nearest ones that fit."""
    layout.check_pipeline_layers(inputs.weights.config.layers)
    ranks, experts = len(inputs.placement_ranks), inputs.weights.model_dims.experts
    return resolve_layout(layout, ranks, experts, partial(check, inputs))


def check(inputs: PlanInputs, layout: Layout) -> None:
    """Raises a UserError where a parallel size does not divide what it shards of the role's model."""
    if inputs.options.fsdp:
        sharded_module(inputs, layout)  # divides the real module, and raises where that is not possible
        return
    assert isinstance(inputs.weights, WeightTable)
    inputs.weights.check_layout(layout)
    if inputs.options.exchanged == "heads":  # other exchanges leave the heads on their ranks
        config = inputs.weights.config
        layout.check_context(config.heads, config.linear_value_heads)
