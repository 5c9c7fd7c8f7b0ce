"""Jobs that are interrupted and resumed in tests."""

import io
import logging
import shutil
from pathlib import Path
from typing import Any

from tests.helpers.tiny_jobs import RECIPES, files_of, run_here, write_sums
from tests.helpers.tiny_models import CHARACTERS, tiny_model, uninitialized_memory_is_nan
from verl_mg.config import load_config
from verl_mg.job.recipe import load_recipe
from verl_mg.models.tiny_model import make_tiny_model

REWARD = "def digits(sample): return sum(c.isdigit() for c in sample.response) - 0.1 * len(sample.response)\n"


def write_inputs(folder: Path) -> Path:
    """Models, sums as prompts and a reward for jobs that resume."""
    tiny_model(folder / "model", "qwen3")
    tiny_model(folder / "mixture", "qwen3_moe")
    # Tied, so that the output layer of a last stage is a copy of the first one's embedding.
    make_tiny_model(folder / "wide", "qwen2", characters=CHARACTERS, kv_heads=4, layers=4, tie_embeddings=True)
    write_sums(folder, right=3)
    for name in ("model", "mixture", "wide"):
        shutil.copytree(folder / name, without_weights(folder / name), ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "reward.py").write_text(REWARD)
    return folder


def without_weights(model: Path) -> Path:
    """The directory beside a model that has its configuration and tokenizer, but no weights."""
    return model.with_name(f"{model.name}-without-weights")


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

    Path.open = counting  # type: ignore[method-assign]
    try:
        job(recipe, inputs, output, iterations, overrides)
    finally:
        Path.open = original  # type: ignore[method-assign]
    return sorted(names)


def job(recipe: str, inputs: Path, output: Path, iterations: int, overrides: list[str]) -> str:
    """Runs a job and returns the messages it logged."""
    loaded = load_recipe(RECIPES / f"{recipe}.py")
    common = [
        *files_of(inputs, output),
        f"job.iterations={iterations}",
        "job.save=false",
        "rollout.max_new_tokens=5",
        f"reward.function={inputs / 'reward.py'}:digits",
    ]
    if recipe != "sft":
        common += ["algorithm.prompts_per_iteration=6", "algorithm.group_size=2", "algorithm.num_minibatches=2"]
    for role in ("actor", "critic"):
        common += [f"{role}.optimizer.lr=2e-3", f"{role}.tokens_per_micro_batch=64"]
    config = load_config(None, common + overrides, loaded.config)
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    logging.getLogger("verl_mg").addHandler(handler)
    try:
        with uninitialized_memory_is_nan():
            run_here(loaded, config)
    finally:
        logging.getLogger("verl_mg").removeHandler(handler)
    return logged.getvalue()
