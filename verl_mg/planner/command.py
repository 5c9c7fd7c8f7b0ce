"""`verl-mg plan`: from the options to the printed report."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement, Layout
from verl_mg.layout.suggest import format_suggestions
from verl_mg.models.hf_config import read_config
from verl_mg.planner.from_config import PlanRequest, RoleRequest
from verl_mg.planner.inputs import PlanInputs, read_hardware_profile
from verl_mg.planner.memory_phases import problem
from verl_mg.planner.report import Numbers, pair_numbers, search_numbers, show
from verl_mg.planner.roles import PlannedRole, auxiliary_role, check
from verl_mg.planner.search import (
    Pair,
    nearest_rollout,
    nearest_train,
    pair_of,
    rollout_side,
    search,
    train_side,
)
from verl_mg.sharding.weight_table import weight_table

OPTIONS = (
    *("ranks", "node", "memory", "reserve", "intra_node", "inter_node", "sequence", "micro_batch", "batch"),
    *("minibatches", "rollout_ranks", "memory_fraction", "offload", "host", "flops", "memory_bandwidth"),
)
"""Those that have the names of a setting's fields."""
ROLES = {"reference": False, "critic": True}
"""Roles with an option of their own, and whether they learn."""


def run(options: argparse.Namespace, job: PlanRequest | None = None) -> None:
    """Print the report. UserError for what cannot be planned, and, after the report, for what does not fit.

    job: what a configuration says; options that were typed win over it.
    """
    job = job or PlanRequest()
    typed = {name: getattr(options, name) for name in OPTIONS if getattr(options, name) is not None}
    if options.recompute:
        typed["recompute"] = options.recompute == "full"
    measured = read_hardware_profile(options.measured) if options.measured else {}
    model = options.model or job.model
    if model is None:
        raise UserError("verl-mg plan takes --model, or RECIPE and --config, a file that names one")
    setting = PlanInputs(
        weight_table(read_config(Path(model))).with_traced_table(job.sharding_table),
        **{**job.setting, **measured, **typed},
    )
    roles = _roles(setting, options, job)
    setting = replace(setting, beside=tuple(auxiliary_role(setting, role) for role in roles), notes=job.notes)
    train, rollout = _given(setting, options, PlanRequest() if options.search else job)
    if options.search:
        if options.top < 1:
            raise UserError(f"--top is {options.top}; write 1 or more")
        _print(search_numbers(setting, search(setting, train, rollout, options.top)), options.json)
        return
    if train is None or rollout is None:
        raise UserError("verl-mg plan takes both --train and --rollout, or --search to find what is left out")
    one = train_side(setting, train)
    pair = pair_of(setting, one, rollout_side(setting, rollout, one.memory))
    _print(pair_numbers(setting, pair), options.json)
    if too_large := problem(setting, one.memory, pair.rollout.memory):
        raise UserError(too_large + _instead(setting, pair))


def _roles(setting: PlanInputs, options: argparse.Namespace, job: PlanRequest) -> list[PlannedRole]:
    """Those of the job, with layouts that were typed in place of its own, and those that were only typed."""
    described = {role.name: role for role in job.roles}
    for name, learns in ROLES.items():
        if layout := getattr(options, name):
            like = described.get(name) or RoleRequest(name, layout, learns, setting.micro_batch, setting.recompute)
            described[name] = replace(like, layout=layout)
    return [
        PlannedRole(
            role.name,
            role.layout,
            weight_table(read_config(Path(role.model)) if role.model else setting.weights.config, role.head),
            role.learns,
            role.micro_batch,
            role.recompute,
            role.ranks,
            role.offload,
        )
        for role in described.values()
    ]


def _given(
    setting: PlanInputs, options: argparse.Namespace, job: PlanRequest
) -> tuple[Layout | None, EngineLayout | None]:
    """The layouts of both sides, checked; None for one that a search is to find."""
    trained, served = options.train or job.train, options.rollout or job.rollout
    return _trained(setting, trained) if trained else None, _served(setting, served) if served else None


def _trained(setting: PlanInputs, text: str) -> Layout:
    layout, ranks = Layout.parse(text), len(setting.standing)
    try:
        fitted = layout.fit(ranks)
        check(setting, fitted)
    except UserError as error:
        raise UserError(f"{error} {format_suggestions(nearest_train(setting, layout), ranks)}") from None
    return fitted


def _served(setting: PlanInputs, text: str) -> EngineLayout:
    layout, ranks = EngineLayout.parse(text), setting.engine_ranks
    try:
        setting.weights.check_engine_layout(layout)
        EnginePlacement(layout, ranks)
    except UserError as error:
        raise UserError(f"{error} {format_suggestions(nearest_rollout(setting, layout), len(ranks))}") from None
    return layout


def _instead(setting: PlanInputs, pair: Pair) -> str:
    """The nearest layouts of the side that is too large, or of training where only both together are."""
    heavy = problem(setting, None, pair.rollout.memory) is not None
    if heavy and not problem(setting, pair.train.memory, None):
        return f". {format_suggestions(nearest_rollout(setting, pair.rollout.layout), len(setting.engine_ranks))}"
    found = nearest_train(setting, pair.train.layout, None if heavy else pair.rollout.memory)
    return f". {format_suggestions(found, len(setting.standing))}"


def _print(numbers: Numbers, as_json: bool) -> None:
    if as_json:
        print(json.dumps(numbers, indent=2))
    else:
        show(numbers)
