"""Runs a recipe on the task of recipes/tasks/repeat_digit.py under its shipped configuration, on real ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.rank_pool import RankPool
from tests.helpers.split_engine import SplittingEngine
from tests.helpers.tiny_jobs import RECIPES, Metrics, logged, run_here
from verl_mg.config import load_config
from verl_mg.job import build_job
from verl_mg.job.recipe import load_recipe
from verl_mg.stores.records import MODEL

LETTERS = RECIPES / "configs" / "repeat_digit"
TEACHER_OF = {"distillation": "sft", "gkd": "sft"}
ENDS = 3
"""Of so many iterations, the first and the last ones, the mean is compared."""


@dataclass(frozen=True)
class Goal:
    """What a run must reach: the mean of the metric begins in the band `start`, and ends `margin` short of `end`."""

    metric: str
    start: tuple[float, float]
    end: float
    margin: float

    def means(self, lines: Metrics) -> tuple[float, float]:
        """Of the first and of the last iterations that have it."""
        values = [line[self.metric] for line in lines if line.get(self.metric) is not None]
        return sum(values[:ENDS]) / ENDS, sum(values[-ENDS:]) / ENDS

    def check(self, lines: Metrics) -> None:
        low, high = self.start
        first, last = self.means(lines)
        assert low <= first <= high, f"{self.metric} begins with {first:.3g}"
        reached = last >= self.end - self.margin if self.end > high else last <= self.end + self.margin
        assert reached, f"{self.metric} goes from {first:.3g} to {last:.3g}"


def recipe_of(config: Path) -> Path:
    """A configuration bears the name of its recipe, or has it among its words."""
    recipes = {recipe.stem: recipe for recipe in RECIPES.glob("[!_]*.py")}
    if config.stem in recipes:
        return recipes[config.stem]
    named = [name for name in recipes if f"_{name}_" in f"_{config.stem}_"]
    return recipes[max(named, key=len)]


def tiny_run(
    ranks: RankPool,
    name: str,
    task: Path,
    output: Path,
    overrides: Sequence[str] = (),
    *,
    count: int = 2,
    recipe: Path | None = None,
    split: bool = False,
) -> Metrics:
    """The lines of metrics.jsonl of a run of recipes/configs/repeat_digit/NAME.yaml on `count` ranks.

    task: what `repeat_digit.make` has written, where a teacher is kept too; output: a folder that does not exist;
    recipe: to take in place of the one of that name; split: cuts responses into the segments of trajectories.
    """
    config = LETTERS / f"{name}.yaml"
    teacher = TEACHER_OF.get(name)
    taught = not any(override.startswith("reference.path=") for override in overrides)
    if teacher and taught and not (task / teacher / MODEL).exists():
        tiny_run(ranks, teacher, task, task / teacher)
    ranks.run(count, _job, recipe or recipe_of(config), placed(config.read_text(), task), output, overrides, split)
    return logged(output)


def _job(recipe_file: Path, text: str, output: Path, overrides: Sequence[str], split: bool) -> None:
    recipe, config = load_recipe(recipe_file), output.with_name(f"{output.name}-{dist.get_rank()}.yaml")
    config.write_text(text)
    tree = load_config(config, [f"job.output={output}", "job.console=false", *overrides], recipe.config)
    with pytest.MonkeyPatch.context() as patch:
        if split:
            patch.setattr(
                build_job, "_wrapper", lambda _, parts: partial(SplittingEngine, decode=parts.data.tokenizer.decode)
            )
        run_here(recipe, tree)


def comparable(lines: Metrics, other: tuple[str, ...] = ("time/", "weight_sync/", "rollout/", "mismatch/")) -> Metrics:
    """Without metrics of ranks, and those that compare engine with trainer, which differ only by rounding."""
    return [{name: value for name, value in line.items() if not name.startswith(other)} for line in lines]


def placed(config: str, task: Path) -> str:
    """The text of a configuration, for any working directory and with the task elsewhere."""
    return config.replace("runs/repeat_digit/", f"{task}/").replace("recipes/tasks/", f"{RECIPES}/tasks/")
