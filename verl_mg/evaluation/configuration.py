"""Configuration of an evaluation: that of a run or of a file without what is for training, the sets, and overrides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_mg.config import Config, RecipeConfig, apply_override, read_tree, validate_config
from verl_mg.errors import UserError
from verl_mg.evaluation.target import Target
from verl_mg.run.run_dir import CONFIG

FOR_TRAINING = {
    "": ("algorithm", "critic", "process_reward", "reference", "checkpoint", "tracking", "profile", "record"),
    "data": ("train", "curriculum"),
    "rollout": ("mode", "extra_prompts", "partial_rollout", "replay_routing", "max_staleness", "stale", "delta"),
    "evaluation": ("every", "prompts"),
    "job": ("iterations", "save"),
}
"""Keys by section that only describe training: a file's values are left out, overrides are not."""
# Name of the set where `data.test` is a path.
UNNAMED = "test"


def evaluation_config(
    target: Target, file: Path | None, sets: Sequence[str], overrides: Sequence[str], output: Path
) -> Config:
    """Returns the configuration of the job that evaluates; the configuration of a run is the base of its evaluation."""
    # NAME=PATH in `sets` keeps the other keys of the set NAME of the configuration. Without `sets` all of its sets are
    # evaluated.
    if target.run and file:
        raise UserError(f"--config {file}: a run has its configuration. Leave it out, and write what differs as a.b=c.")
    origin = target.run / CONFIG if target.run else file
    # Without the section `algorithm` no recipe is needed, so the file of any job serves.
    tree = read_tree(origin) if origin else {}
    for section, keys in FOR_TRAINING.items():
        part = _section(tree, section) if section else tree
        for key in keys:
            part.pop(key, None)
    if target.run and target.model:
        _section(tree, "actor").pop("lora", None)  # exports have their adapters merged
    _section(tree, "evaluation")["prompts"] = None  # all of them, unless an override says otherwise
    data = _section(tree, "data")
    if sets:
        data["test"] = _chosen(sets, data.get("test"))
    for override in overrides:
        apply_override(tree, override)
    if isinstance(data.get("test"), str):
        data["test"] = {UNNAMED: {"path": data["test"]}}
    if not data.get("test"):
        raise UserError("data.test: there are no sets to evaluate. Write --set NAME=PATH.")
    data.setdefault("train", str(output))  # required, but never read
    if target.model is not None:
        _section(tree, "model")["path"] = str(target.model)
    _section(tree, "job").update(output=str(output), iterations=1, save=False)
    return validate_config(tree, origin or "overrides", RecipeConfig)


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    section = tree.setdefault(name, {})
    return section if isinstance(section, dict) else {}  # the validation refuses any other value


def _chosen(sets: Sequence[str], known: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    described = {name: of_set for name, of_set in (known if isinstance(known, dict) else {}).items() if of_set}
    for text in sets:
        name, separator, path = text.partition("=")
        if not re.fullmatch(r"[\w-]+", name):
            raise UserError(f"--set {text}: {name!r} is not a name. Write NAME=PATH with letters, digits, - and _.")
        if not separator and name not in described:
            have = ", ".join(described) or "none"
            raise UserError(f"--set {text}: the configuration has no such set; it has {have}. Write NAME=PATH.")
        chosen[name] = described.get(name, {}) | ({"path": path} if separator else {})
    return chosen
