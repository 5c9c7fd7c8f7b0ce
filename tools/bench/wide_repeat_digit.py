"""The task of recipes/tasks/repeat_digit.py with a model wide enough to be worth timing."""

from __future__ import annotations

from pathlib import Path

from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.recipes.tasks import repeat_digit

RECIPES = Path(__file__).parents[2] / "recipes"


def make(folder: Path, hidden: int, layers: int) -> None:
    """Writes the data of the task and `model/`."""
    repeat_digit.make(folder)
    make_tiny_model(
        folder / "model",
        "qwen3",
        characters=repeat_digit.DIGITS + "=",
        hidden=hidden,
        layers=layers,
        ffn=3 * hidden,
        max_positions=1024,
        head_dim=32,  # vLLM has no smaller ones on the CPU
    )


def overrides(folder: Path, recipe: str = "ppo", prompts: int = 48, tokens: int = 48) -> list[str]:
    """Returns overrides with a reference, and two optimizer steps in each of PPO's two epochs."""
    groups = {"ppo": (prompts, 1), "grpo": (prompts // 4, 4)}
    steps = {"ppo": ["critic_warmup=0", "num_minibatches=2", "num_epochs=2"], "grpo": ["num_minibatches=2"]}
    return [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'data' / 'train.jsonl'}",
        f"reward.function={repeat_digit.__file__}:score",
        f"rollout.max_new_tokens={tokens}",
        f"algorithm.prompts_per_iteration={groups[recipe][0]}",
        "algorithm.kl.coefficient=0.01",
        *(f"algorithm.{step}" for step in steps[recipe]),
        *([f"algorithm.group_size={groups[recipe][1]}"] if recipe == "grpo" else []),
    ]
