"""Command `verl-mg plan`: computes a plan from its options and prints the report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from verl_mg.config import FsdpConfig
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement, Layout
from verl_mg.layout.suggest import format_suggestions
from verl_mg.models.hf_config import read_config
from verl_mg.planner.cost import inference_seconds, train_seconds
from verl_mg.planner.efficiency import FITTED, gpu
from verl_mg.planner.from_config import PlanRequest
from verl_mg.planner.inputs import AuxiliaryRole, PlanInputs, read_hardware_profile
from verl_mg.planner.memory import check, check_engine, fit_layout, train_memory
from verl_mg.planner.memory_phases import problem
from verl_mg.planner.report import pair_numbers, search_numbers, show
from verl_mg.planner.search import (
    Pair,
    nearest_rollout,
    nearest_train,
    pair_of,
    recomputations,
    rollout_side,
    search,
    train_side,
)
from verl_mg.planner.training_options import (
    DEFAULT_OPTIONS,
    RECOMPUTABLE,
    Recompute,
    TrainingOptions,
    fsdp_options,
    recompute,
)
from verl_mg.sharding.model_table import Head, ModelTable
from verl_mg.sharding.module_table import module_table
from verl_mg.sharding.weight_table import weight_table

ROLE_OPTIONS = {"reference": False, "critic": True}
"""Auxiliary roles with an option for their layout, and whether they are trained."""


def run(options: argparse.Namespace, job: PlanRequest | None = None) -> None:
    """Prints the report of a plan; given options have precedence over the job's configuration."""
    job = job or PlanRequest()
    names = [field.name for field in fields(PlanInputs)]
    given = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    if options.recompute is not None:
        given["recompute"] = _recompute(options.recompute)
    sheet = FITTED.figures(gpu(options.gpu)) | {"node": gpu(options.gpu).node} if options.gpu else {}
    measured = read_hardware_profile(options.measured) if options.measured else {}
    if options.mean_sequence and options.tokens_per_iteration is None and "tokens_per_iteration" in job.fields:
        # A configuration has a number of samples, whose tokens were counted at their full length.
        full = job.fields["tokens_per_iteration"] / job.fields["sequence"]
        given["tokens_per_iteration"] = round(full * options.mean_sequence)
    model = options.model or job.model
    if model is None:
        raise UserError("--model: no model is given. Pass --model, or RECIPE and --config, a file with model.path.")
    if options.backend:
        of_backend = {"megatron": DEFAULT_OPTIONS, "fsdp": fsdp_options(FsdpConfig(), "bfloat16")}
        given["options"] = of_backend[options.backend]
    given = {**job.fields, **sheet, **measured, **given}  # later ones win: what is measured replaces a data sheet
    inputs = plan_inputs(job, model, given, partial(_roles, options=options, job=job))
    # A search keeps layouts that options name, and not the configuration's, which it is to replace.
    kept = PlanRequest() if options.search else job
    trained, served = Layout.parse(options.train) if options.train else kept.train, options.rollout or kept.rollout
    train = _trained(inputs, trained) if trained else None
    rollout = _served(inputs, served) if served else None
    if options.search:
        if options.top < 1:
            raise UserError(f"--top: {options.top} is not above 0. Use 1 or more.")
        tried = None if options.recompute or "recompute" in job.fields else recomputations(inputs)
        show(search_numbers(inputs, search(inputs, train, rollout, options.top, tried)), options.json)
        return
    if train is None or rollout is None:
        raise UserError("--train, --rollout: one of them is missing. Pass both, or --search to find the missing ones.")
    actor = train_side(inputs, train)
    pair = pair_of(inputs, actor, rollout_side(inputs, rollout, actor.memory))
    show(pair_numbers(inputs, pair), options.json)
    # After the report, which shows the parts that are too large.
    if too_large := problem(inputs, actor.memory, pair.rollout.memory):
        raise _with_suggestions(too_large, _nearest_layouts(inputs, pair))


def _recompute(text: str) -> Recompute:
    """Reads `--recompute`: full, none, or modules of a layer."""
    if text in ("full", "none"):
        return text == "full"
    modules = text.split(",")
    for module in modules:
        if module not in RECOMPUTABLE:
            raise UserError(f"--recompute: unknown module {module!r}. Use full, none, or {', '.join(RECOMPUTABLE)}.")
    return recompute(modules)


def plan_inputs(
    job: PlanRequest, model: str, given: Mapping[str, Any], roles: Callable[[PlanInputs], Iterable[AuxiliaryRole]]
) -> PlanInputs:
    """Returns the inputs of a plan: the actor's model and values by their names, then the other roles."""
    table = _table(model, "language", given.get("options", DEFAULT_OPTIONS))
    inputs = PlanInputs(table.for_engine(job.engine).with_traced_table(job.sharding_table), **given)
    others = [
        auxiliary_role(inputs, role, _table(role.model or model, role.head, role.options)) for role in roles(inputs)
    ]
    return replace(inputs, auxiliary_roles=tuple(others), notes=job.notes)


def _table(model: str, head: Head, options: TrainingOptions) -> ModelTable:
    """Returns the weight table of a role's model: of the module with the FSDP backend, else the built-in one."""
    return module_table(model, head) if options.fsdp else weight_table(read_config(Path(model)), head)


def _roles(inputs: PlanInputs, options: argparse.Namespace, job: PlanRequest) -> list[AuxiliaryRole]:
    """Returns the auxiliary roles of the job, with layouts from options, and those only given by options."""
    described = {role.name: role for role in job.roles}
    like_actor = inputs.options if inputs.options.fsdp else DEFAULT_OPTIONS  # a role by option has the actor's backend
    for name, is_trained in ROLE_OPTIONS.items():
        if text := getattr(options, name):
            layout = Layout.parse(text)
            new = AuxiliaryRole(name, layout, is_trained, inputs.micro_batch, inputs.recompute, options=like_actor)
            described[name] = replace(described.get(name) or new, layout=layout)
    return list(described.values())


def auxiliary_role(inputs: PlanInputs, role: AuxiliaryRole, weights: ModelTable) -> AuxiliaryRole:
    """Returns a role with its memory and predicted seconds; `weights` is the table of its model."""
    # The inputs of the actor with the role's model, ranks and options: so the actor's functions compute any role.
    try:
        role_inputs = replace(
            inputs,
            weights=weights,
            micro_batch=role.micro_batch,
            recompute=role.recompute,
            options=role.options,
            role_ranks=role.ranks,
        )
        layout = fit_layout(role_inputs, role.layout)
    except UserError as error:
        raise UserError(f"{role.name}: {error}") from None
    return replace(
        role,
        layout=layout,
        ranks=role_inputs.placement_ranks,
        parts=train_memory(role_inputs, layout, role.is_trained).parts,
        update_seconds=train_seconds(role_inputs, layout) if role.is_trained else 0.0,
        inference_seconds=inference_seconds(role_inputs, layout),
    )


def _trained(inputs: PlanInputs, layout: Layout) -> Layout:
    layout.check_pipeline_layers(inputs.weights.config.layers)
    ranks = len(inputs.placement_ranks)
    try:
        fitted = layout.fit(ranks)
        check(inputs, fitted)
    except UserError as error:
        raise _with_suggestions(str(error), format_suggestions(nearest_train(inputs, layout), ranks)) from None
    return fitted


def _served(inputs: PlanInputs, text: str) -> EngineLayout:
    layout, ranks = EngineLayout.parse(text), inputs.engine_ranks
    try:
        check_engine(inputs, layout)
        EnginePlacement(layout, ranks)
    except UserError as error:
        raise _with_suggestions(str(error), format_suggestions(nearest_rollout(inputs, layout), len(ranks))) from None
    return layout


def _nearest_layouts(inputs: PlanInputs, pair: Pair) -> str:
    """Formats the nearest layouts of the side that is too large, or of training where only both together are."""
    rollout_too_large = problem(inputs, None, pair.rollout.memory) is not None
    if rollout_too_large and not problem(inputs, pair.train.memory, None):
        return format_suggestions(nearest_rollout(inputs, pair.rollout.layout), len(inputs.engine_ranks))
    layouts = nearest_train(inputs, pair.train.layout, None if rollout_too_large else pair.rollout.memory)
    return format_suggestions(layouts, len(inputs.placement_ranks))


def _with_suggestions(error: str, suggestions: str) -> UserError:
    return UserError(f"{error.rstrip('.')}. {suggestions}")
