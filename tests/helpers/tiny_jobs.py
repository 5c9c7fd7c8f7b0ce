"""Whole jobs on ranks of the pool: what they are given, how one is run, and what it logged."""

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path

import torch.distributed as dist

from tests.helpers.json_lines import read_lines, write_lines
from tests.helpers.rank_pool import job_store
from verl_mg.config import Config, load_config
from verl_mg.distributed.world import World
from verl_mg.job.recipe import Recipe, load_recipe
from verl_mg.run.loop import FULL_RUN, RunMode, train
from verl_mg.stores.folders import SUMS

RECIPES = Path(__file__).parents[2] / "recipes"
DIGITS = "def digits(sample): return sum(c.isdigit() for c in sample.response)\n"
"""A random model never adds, so the reward is one that it can earn."""

Metrics = list[dict[str, float]]


def write_sums(folder: Path, left: int = 10, right: int = 4) -> None:
    """sums.jsonl: `a+b=` for each a below `left` and b below `right`."""
    sums = ((a, b) for a in range(left) for b in range(right))
    write_lines(folder / "sums.jsonl", ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums))


def files_of(inputs: Path, output: Path) -> list[str]:
    """Overrides: the model and the sums in `inputs`, and a silent run in `output`."""
    return [
        f"model.path={inputs / 'model'}",
        f"data.train={inputs / 'sums.jsonl'}",
        f"job.output={output}",
        "job.console=false",
    ]


def run_recipe(
    recipe: str | Path, overrides: Sequence[str], mode: RunMode = FULL_RUN, file: str | Path | None = None
) -> Config:
    """This rank's part of a job; the recipe is a file, or the name of one that is shipped."""
    loaded = load_recipe(recipe)
    configured = load_config(file, overrides, loaded.config)
    run_here(loaded, configured, mode)
    return configured


def roles_of(recipe: str | Path) -> Collection[str]:
    loaded = load_recipe(recipe)
    return loaded.roles(loaded.config())


def run_here(recipe: Recipe, config: Config, half: RunMode = FULL_RUN) -> None:
    train(recipe, config, World(dist.get_rank(), dist.get_world_size(), job_store()), half)


def logged(output: Path) -> Metrics:
    return read_lines(output / "metrics.jsonl")


def metrics_of(output: Path) -> Metrics:
    """The same without seconds, which no two runs share."""
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in logged(output)]


def rewrite_sums(checkpoint: Path) -> None:
    """Makes SHA256SUMS agree with damaged files, so that their readers meet the damage."""
    files = [path for path in sorted(checkpoint.iterdir()) if path.is_file() and path.name != SUMS]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (checkpoint / SUMS).write_text("".join(lines))
