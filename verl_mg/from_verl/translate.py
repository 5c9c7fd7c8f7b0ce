"""Translates a job of verl into a recipe and its configuration, which is checked, and the lines about the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from verl_mg.config import Config, validate_config
from verl_mg.config.checks import REFUSALS, JobCase, refuse
from verl_mg.config.effects import without_effect
from verl_mg.config.keys import subsection
from verl_mg.config.tree import tree_for
from verl_mg.errors import UserError
from verl_mg.from_verl.job import Remark, VerlJob
from verl_mg.from_verl.reading import LONG, SHORT, read_verl
from verl_mg.from_verl.remarks import UNREAD
from verl_mg.from_verl.table import ROWS
from verl_mg.job.recipe import Recipe, load_recipe, requested_roles

RECIPES = {
    ("gae", "vanilla"): "ppo",
    ("grpo", "vanilla"): "grpo",
    ("grpo_vectorized", "vanilla"): "grpo",
    ("rloo", "vanilla"): "rloo",
    ("rloo_vectorized", "vanilla"): "rloo",
    ("remax", "vanilla"): "remax",
    ("reinforce_plus_plus", "vanilla"): "reinforce_plus_plus",
    ("reinforce_plus_plus_baseline", "vanilla"): "reinforce_plus_plus_baseline",
    ("opo", "vanilla"): "opo",
    ("optimal_token_baseline", "vanilla"): "otb",
    ("tir_optimal_token_baseline", "vanilla"): "otb",
    ("gdpo", "vanilla"): "gdpo",
    ("gpg", "gpg"): "gpg",
    ("grpo", "gspo"): "gspo",
    ("grpo", "sapo"): "sapo",
    ("grpo", "geo_mean"): "gmpo",
    ("grpo", "cispo"): "cispo",
    ("grpo", "clip_cov"): "clip_cov",
    ("grpo", "kl_cov"): "kl_cov",
    ("grpo", "dppo_tv"): "dppo",
    ("grpo", "dppo_kl"): "dppo",
}
"""Recipes by advantage and policy loss of verl."""
FIXED = {"algorithm.normalize_by_std": True}
"""Values that recipes without these keys have."""
KINDS = ("no counterpart", "unknown", "ask", "ignored")
"""Kinds of lines, in the order in which they are printed."""


@dataclass(frozen=True)
class Translation:
    """A recipe, its configuration as plain values and as it is read, and the lines about what is not in it."""

    recipe: Recipe
    tree: dict[str, Any]
    config: Config
    unused: dict[str, Any]  # values by our key that would have no effect, and are left out
    remarks: list[Remark]
    job: VerlJob


def translate(path: Path, overrides: list[str]) -> Translation:
    """Reads a file of verl; UserError where no job here means the same."""
    job = VerlJob(read_verl(path, overrides))
    recipe = load_recipe(recipe_name(job))
    values = converted(job, recipe)
    _add_unread(job)
    origin = f"{path}, translated"
    config = validate_config(_nested(values), origin, recipe.config)
    unused = _without_effect(values, config, recipe, job)
    tree = _nested({key: value for key, value in values.items() if key not in unused})
    config = validate_config(tree, origin, recipe.config)
    _check(config, recipe, job)
    return Translation(recipe, tree, config, unused, _grouped(job.remarks), job)


def recipe_name(job: VerlJob) -> str:
    """Returns the name of the recipe; UserError where none has the advantage and the loss."""
    name = RECIPES.get((job.advantage, job.loss))
    if name is None:
        losses = [loss for advantage, loss in RECIPES if advantage == job.advantage]
        key, others = "aorr.actor.policy_loss.loss_mode", losses
        if not losses:
            key, others = "algorithm.adv_estimator", list(dict.fromkeys(advantage for advantage, _ in RECIPES))
        raise job.refusal(key, f"no recipe has it. There are recipes for {', '.join(others)}")
    if job["algorithm.use_pf_ppo"]:
        if name != "ppo":
            raise job.refusal("algorithm.use_pf_ppo", "recipes/pf_ppo.py has a critic. Set adv_estimator=gae")
        return "pf_ppo"
    if job["algorithm.filter_groups.enable"]:
        if name != "grpo":
            job.report("no counterpart", "algorithm.filter_groups.enable", f"recipes/{name}.py keeps all groups")
            return name
        return "dapo"
    return name


def converted(job: VerlJob, recipe: Recipe) -> dict[str, Any]:
    """Returns the values by our key that the file gives, and verl's defaults that differ from ours."""
    values: dict[str, Any] = {}
    tree = tree_for(recipe.config)
    for row in ROWS:
        given = tuple(key for key in job.given if row.reads(key))
        if not row.when.holds(job):
            if given:
                job.report("ignored", given, f"verl does not read it {row.when.otherwise}")
            continue
        for key, value in row.convert(job).items():
            default = default_of(tree, key)
            if default is MISSING:
                if value != FIXED.get(key, MISSING) and value is not None:
                    text = f"recipes/{recipe.name}.py has no {key}, which would be {value}"
                    job.report("no counterpart", given or row.theirs[0], text)
            elif given or value != default:
                values[key] = value
    return values


MISSING = object()


def default_of(tree: type[BaseModel], key: str) -> Any:
    """Returns the default of one of our keys, None for one without; MISSING where the recipe does not have it."""
    holder: Any = tree
    for name in key.split("."):
        if not isinstance(holder, BaseModel | type):
            return None  # within a mapping such as megatron.transformer, or a section that is null
        kind: Any = holder if isinstance(holder, type) else type(holder)
        if name not in kind.model_fields:
            return MISSING
        field = kind.model_fields[name]
        holder = (
            getattr(holder, name) if isinstance(holder, BaseModel) else field.get_default(call_default_factory=True)
        )
        if holder is PydanticUndefined:  # a required section, or a required value
            inner = subsection(field.annotation)
            holder = inner[1] if inner and not inner[0] else None
    return list(holder) if isinstance(holder, tuple) else holder


def _without_effect(values: dict[str, Any], config: Config, recipe: Recipe, job: VerlJob) -> dict[str, Any]:
    """Returns the values that a job would refuse since they have no effect; a line says so where the file has them."""
    unused: dict[str, Any] = {}
    for key, reason in without_effect(config, requested_roles(recipe, config)):
        below = {name: value for name, value in values.items() if f"{name}.".startswith(f"{key}.")}
        unused |= below
        for name, value in below.items():
            of_key = [row for row in ROWS if any(name == ours or name.startswith(f"{ours}.") for ours in row.ours)]
            if given := tuple(theirs for theirs in job.given if any(row.reads(theirs) for row in of_key)):
                job.report("ignored", given, f"{name}={value} has no effect, since {reason}")
    return unused


def _add_unread(job: VerlJob) -> None:
    """Adds the line of each key that no row reads."""
    for key in job.given:
        if any(row.reads(key) for row in ROWS):
            continue
        unread = next((unread for unread in UNREAD if unread.fits(key)), None)
        if unread is None:
            job.report("unknown", key, "not a key of verl 0.9.1 that is known here")
        elif unread.kind != "ignored" and unread.is_off(key, job):
            job.report("ignored", key, "off, or as here")
        else:
            job.report(unread.kind, key, unread.text)


def _grouped(remarks: Iterable[Remark]) -> list[Remark]:
    """Returns one line for the ignored keys of one reason; others, whose values matter, have a line each."""
    groups: dict[tuple[str, str], list[str]] = {}
    for remark in remarks:
        key = (remark.kind, remark.text) if remark.kind == "ignored" else (remark.kind, f"{remark.text}\0{remark.keys}")
        groups.setdefault(key, []).extend(name for name in remark.keys if name not in groups.get(key, []))
    lines = [Remark(kind, tuple(keys), text.split("\0")[0]) for (kind, text), keys in groups.items()]  # type: ignore[arg-type]
    return sorted(lines, key=lambda remark: KINDS.index(remark.kind))


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values as sections, in the order of docs/configuration.md."""
    tree: dict[str, Any] = {}
    sections = list(Config.model_fields)
    for key, value in sorted(values.items(), key=lambda item: sections.index(item[0].split(".")[0])):
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _check(config: Config, recipe: Recipe, job: VerlJob) -> None:
    """Checks the configuration as the job would on GPUs, as far as no model is needed."""
    from verl_mg.engines.kinds import ENGINES  # imports torch

    roles = requested_roles(recipe, config)
    abilities = ENGINES[config.rollout.engine].abilities
    refuse(REFUSALS, JobCase(config, abilities, job.ranks, job.ranks_of_a_node, on_gpus=True))
    for role in ("actor", "critic", "reference"):
        if role in roles:
            try:
                config.section(role).parallel_sizes.fit(job.ranks)
            except UserError as error:
                raise UserError(f"{role}.layout: {error}") from None


def from_verl(path: Path, overrides: list[str], output: Path | None) -> None:
    """Writes the translation to a file or, without one, prints it, and the lines about the rest to stderr."""
    done = translate(path, overrides)
    nodes = done.job.ranks // done.job.ranks_of_a_node
    start = f"torchrun {f'--nnodes {nodes} ' if nodes > 1 else ''}--nproc-per-node {done.job.ranks_of_a_node}"
    head = (
        f"# From {path.name}, for {done.job.ranks} GPU{'s' * (done.job.ranks > 1)}:\n#\n"
        f"#   {start} -m verl_mg train recipes/{done.recipe.name}.py --config {output or 'FILE'}\n"
    )
    text = head + yaml.safe_dump(done.tree, sort_keys=False, allow_unicode=True)
    if output:
        output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    for remark in done.remarks:
        print(remark.line(done.job).replace(SHORT, LONG), file=sys.stderr)
