"""Target of an evaluation, and its configuration: that of a run or of a file without training, sets, overrides."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_mg.config import Config, RecipeConfig, apply_override, read_tree, validate_config
from verl_mg.errors import UserError
from verl_mg.run.checkpointer import checkpoints_in, newest_intact
from verl_mg.run.run_dir import CONFIG
from verl_mg.stores.folders import LocalFolders, StoredFolder
from verl_mg.stores.records import CHECKPOINTS, EXPORTS, MODEL

FOR_TRAINING = {
    "": ("algorithm", "critic", "process_reward", "reference", "checkpoint", "tracking", "profile", "record"),
    "data": ("train", "curriculum"),
    "rollout": (
        "mode",
        "extra_prompts",
        "partial_rollout",
        "replay_routing",
        "replay_selections",
        "max_staleness",
        "stale",
        "delta",
    ),
    "evaluation": ("every", "prompts"),
    "job": ("iterations", "save"),
}
"""Keys by section that only describe training: a file's values are left out, overrides are not."""
# Name of the set where `data.test` is a path.
UNNAMED = "test"


@dataclass(frozen=True)
class Target:
    """A model directory or name, or a run."""

    text: str
    model: Path | None
    """Directory or name of the model; None for the model of the run's configuration, under a checkpoint."""
    run: Path | None = None  # folder of the run; None for a model
    iteration: int | None = None  # iteration of the run; None for its final model, or its newest checkpoint

    @classmethod
    def parse(cls, text: str) -> Target:
        """Returns the target of a model directory, a name on a hub, RUN or RUN@ITERATION."""
        # Of a run the exported model is used, or else its checkpoint: `model` or `checkpoints`, and with an iteration
        # `export/000012/model` or `checkpoints/000012`.
        folder, _, number = text.rpartition("@")
        run = Path(text)
        iteration = None
        if folder and number.isdecimal() and (Path(folder) / CONFIG).is_file():
            run, iteration = Path(folder), int(number)
        if not (run / CONFIG).is_file():
            return cls(text, Path(text))
        exported = run / MODEL if iteration is None else run / EXPORTS / f"{iteration:06d}" / MODEL
        return cls(text, exported if (exported / "config.json").is_file() else None, run, iteration)

    @property
    def output(self) -> Path:
        """Default folder of the evaluation."""
        if self.run is None:
            return Path("runs") / "evaluation" / Path(self.text).name
        return self.run / "evaluation" / ("final" if self.iteration is None else f"{self.iteration:06d}")

    def checkpoint(self) -> StoredFolder | None:
        """Returns the checkpoint to evaluate, None for a model; all ranks together. UserError without an intact one."""
        if self.model is not None or self.run is None:
            return None
        before = None if self.iteration is None else self.iteration + 1
        newest = newest_intact(LocalFolders(self.run / CHECKPOINTS), before)
        if newest and self.iteration in (None, int(newest.name)):
            return newest
        folders = (self.run / CHECKPOINTS, self.run / EXPORTS)
        written = sorted({int(name) for folder in folders for name in checkpoints_in(LocalFolders(folder))})
        has = f"has iterations {', '.join(map(str, written))}" if written else "has none"
        what = "model" if self.iteration is None else f"intact checkpoint or export of iteration {self.iteration}"
        raise UserError(f"{self.text}: no {what}; the run {has}. Write RUN@ITERATION with one of them.")


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
