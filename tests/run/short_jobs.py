"""Short jobs of three iterations for tests of the loop and of what a run records."""

from pathlib import Path

from tests.helpers.tiny_jobs import DIGITS, RECIPES, files_of, run_here, write_sums
from tests.helpers.tiny_models import tiny_model
from verl_mg.config import load_config
from verl_mg.job.recipe import load_recipe

GRPO = ["algorithm.prompts_per_iteration=6", "algorithm.group_size=4", "algorithm.kl.coefficient=0.01"]


def write_inputs(folder: Path) -> Path:
    """A model, sums as prompts, and a reward that a random model can earn."""
    tiny_model(folder / "model", "qwen3")
    write_sums(folder)
    (folder / "reward.py").write_text(DIGITS)
    return folder


def job(recipe: str, inputs: Path, output: Path, overrides: list[str]) -> None:
    loaded = load_recipe(RECIPES / f"{recipe}.py")
    common = [
        *files_of(inputs, output),
        "job.iterations=3",
        "actor.optimizer.lr=1e-3",
        "rollout.max_new_tokens=5",
        f"reward.function={inputs / 'reward.py'}:digits",
    ]
    config = load_config(None, common + overrides, loaded.config)
    run_here(loaded, config)
