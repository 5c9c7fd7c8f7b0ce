"""Tiny jobs whose samples are looked at, or trained on again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.split_engine import SplittingEngine
from tests.helpers.tiny_jobs import RECIPES, files_of, metrics_of, run_here, write_sums
from tests.helpers.tiny_models import tiny_model
from verl_mg.config import load_config
from verl_mg.data import read_records
from verl_mg.errors import UserError
from verl_mg.job.job import Job
from verl_mg.job.recipe import load_recipe
from verl_mg.rewards import Reward
from verl_mg.rollout.engine_group import EngineWrapper
from verl_mg.run.mode import FULL_RUN, RunMode

# A random model never adds, so the reward is one that it can earn, with a part that only some answers have.
REWARD = """
from verl_mg.rewards import Reward

def score(sample):
    digits = sum(c.isdigit() for c in sample.response)
    return Reward(float(digits), {"odd": 0.5} if digits % 2 else {})
"""


def make_inputs(folder: Path) -> Path:
    """A model, prompts and a reward."""
    tiny_model(folder / "model", "qwen3", layers=2)
    write_sums(folder)
    (folder / "reward.py").write_text(REWARD)
    return folder


def split_job(recipe: str, inputs: Path, output: Path, overrides: list[str], half: RunMode = FULL_RUN) -> None:
    """A `job` whose responses are cut into the segments of trajectories, some with rewards."""

    def wrapper(of: Job) -> EngineWrapper:
        decode = partial(of.tokenizer.decode, skip_special_tokens=True)
        return partial(SplittingEngine, decode=decode, reward=lambda s: Reward(9.0) if s.id % 4 == 0 else None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "_with_tools", wrapper)
        job(recipe, inputs, output, overrides, half)


def job(recipe: str | Path, inputs: Path, output: Path, overrides: list[str], half: RunMode = FULL_RUN) -> None:
    """A run of three iterations on this rank."""
    loaded = load_recipe(RECIPES / f"{recipe}.py" if isinstance(recipe, str) else recipe)
    common = [
        *files_of(inputs, output),
        "job.iterations=3",
        "job.save=false",
        "checkpoint.every=0",
        "actor.optimizer.lr=1e-3",
        "rollout.max_new_tokens=6",
        f"reward.function={inputs / 'reward.py'}:score",
    ]
    if "rollout" in loaded.roles(loaded.config()):
        common += ["algorithm.prompts_per_iteration=5", "algorithm.group_size=2"]
    config = load_config(None, common + overrides, loaded.config)
    run_here(loaded, config, half)


def refusal(*arguments: Any) -> str:
    """Why a job does not run."""
    with pytest.raises(UserError) as caught:
        job(*arguments)
    return str(caught.value)


def lines_of(output: Path) -> dict[int, dict[str, float]]:
    """What metrics.jsonl says of each step, seconds left out."""
    return {int(line["step"]): line for line in metrics_of(output)}


def samples_of(output: Path, iteration: int) -> list[dict[str, Any]]:
    """All rows of an iteration, rank after rank."""
    files = sorted((output / "samples" / f"{iteration:06d}").glob("*.parquet"))
    return [record for file in files for record in read_records(file)]
