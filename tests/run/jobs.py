"""Tiny jobs of three iterations: recorded, trained on again, interrupted and resumed."""

import io
import logging
import os
import shutil
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from tests.helpers.rank_pool import job_store
from tests.helpers.split_engine import SplittingEngine
from tests.helpers.tiny_jobs import files_of, metrics_of, roles_of, run_recipe, write_sums
from tests.helpers.tiny_models import CHARACTERS, tiny_model, uninitialized_memory_is_nan
from verl_mg.config import Config, load_config
from verl_mg.engines.engine import Sample
from verl_mg.job import build_job
from verl_mg.job.build_job import JobParts
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import load_recipe, requested_roles
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.rewards import Reward
from verl_mg.rollout.engine_group import WrapEngine
from verl_mg.run.loop import FULL_RUN, RunMode

GRPO = ["algorithm.prompts_per_iteration=6", "algorithm.group_size=4", "algorithm.kl.coefficient=0.01"]
# A random model never adds, so the reward is one that it can earn, with a part that only some answers have.
REWARD = """
from verl_mg.rewards import Reward

def score(sample):
    digits = sum(c.isdigit() for c in sample.response)
    return Reward(float(digits), {"odd": 0.5} if digits % 2 else {})
"""


def make_inputs(folder: Path, layers: int = 2) -> Path:
    tiny_model(folder / "model", "qwen3", layers=layers)
    write_sums(folder)
    (folder / "reward.py").write_text(REWARD)
    return folder


def job(recipe: str | Path, inputs: Path, output: Path, overrides: list[str], mode: RunMode = FULL_RUN) -> None:
    """A run of three iterations on this rank."""
    common = [
        *files_of(inputs, output),
        "job.iterations=3",
        "job.save=false",
        "checkpoint.every=0",
        "actor.optimizer.lr=1e-3",
        "rollout.max_new_tokens=6",
        f"reward.function={inputs / 'reward.py'}:score",
    ]
    if "rollout" in roles_of(recipe):
        common += ["algorithm.prompts_per_iteration=5", "algorithm.group_size=2"]
    run_recipe(recipe, [*common, *overrides], mode)


def split_job(recipe: str, inputs: Path, output: Path, overrides: list[str], mode: RunMode = FULL_RUN) -> None:
    """A `job` whose responses are cut into the segments of trajectories, some with rewards."""

    def reward(sample: Sample) -> Reward | None:
        return Reward(9.0) if sample.id % 4 == 0 else None

    def wrapper(_: Config, parts: JobParts) -> WrapEngine:
        return partial(SplittingEngine, decode=parts.data.tokenizer.decode, reward=reward)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_job, "_wrapper", wrapper)
        job(recipe, inputs, output, overrides, mode)


def lines_of(output: Path) -> dict[int, dict[str, float]]:
    """What metrics.jsonl says of each step, seconds left out."""
    return {int(line["step"]): line for line in metrics_of(output)}


def samples_of(output: Path, iteration: int) -> list[dict[str, Any]]:
    files = sorted((output / "samples" / f"{iteration:06d}").glob("rank-*.parquet"))
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


def built_job(inputs: Path, *overrides: str, **options: Any) -> RunningJob:
    """A job of GRPO on this rank that has not started."""
    recipe = load_recipe("grpo")
    settings = [*files_of(inputs, inputs), f"reward.function={inputs / 'reward.py'}:score", "rollout.max_new_tokens=6"]
    settings += overrides
    config = load_config(None, settings, recipe.config)
    return RunningJob(config, requested_roles(recipe, config), job_store(), **options)


# -- jobs that are interrupted and resumed


def make_resumable_inputs(folder: Path) -> Path:
    """The same with a deeper model, further ones, and each once more without weights."""
    make_inputs(folder, layers=4)
    tiny_model(folder / "mixture", "qwen3_moe")
    # Tied, so that the output layer of a last stage is a copy of the first one's embedding.
    make_tiny_model(folder / "wide", "qwen2", characters=CHARACTERS, kv_heads=4, layers=4, tie_embeddings=True)
    for name in ("model", "mixture", "wide"):
        shutil.copytree(folder / name, without_weights(folder / name), ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def without_weights(model: Path) -> Path:
    """The directory next to a model that has its configuration and tokenizer, but no weights."""
    return model.with_name(f"{model.name}-without-weights")


def resumable_job(recipe: str | Path, inputs: Path, output: Path, iterations: int, overrides: list[str]) -> str:
    """Runs a job and returns the messages it logged."""
    settings = [f"job.iterations={iterations}", "rollout.max_new_tokens=5"]
    if recipe != "sft":
        settings += ["algorithm.prompts_per_iteration=6", "algorithm.group_size=2", "algorithm.num_minibatches=2"]
    for role in {"actor", "critic"} & set(roles_of(recipe)):
        settings += [f"{role}.optimizer.lr=2e-3", f"{role}.tokens_per_micro_batch=64"]
    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger("verl_mg").addHandler(handler)
    try:
        with uninitialized_memory_is_nan():
            job(recipe, inputs, output, settings + overrides)
    finally:
        logging.getLogger("verl_mg").removeHandler(handler)
    return handler.stream.getvalue()


def copy_interrupted(run: Path, folder: Path, iterations: int) -> None:
    """Copies a run, which has a checkpoint of that iteration, as it was after it."""
    shutil.copytree(run, folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name) > iterations:
            shutil.rmtree(checkpoint)
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:iterations]))


def opened_files(recipe: str, inputs: Path, output: Path, iterations: int, overrides: list[str]) -> list[str]:
    """Runs a job; returns the names of the files that this rank opened, once for each time: checkpoints and weights."""
    names, original = [], Path.open

    def counting(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.parent.parent.name == "checkpoints" or path.suffix == ".safetensors":
            names.append(path.name)
        return original(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", counting)
        resumable_job(recipe, inputs, output, iterations, overrides)
    return sorted(names)


def kill_ranks(pids: Sequence[int]) -> None:
    """Kills all ranks, of which this process is one; none sees before it ends that another one has."""
    others = [pid for pid in pids if pid != os.getpid()]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in others:
            os.kill(pid, number)
    os.kill(os.getpid(), signal.SIGKILL)
