"""The task of recipes/tasks/repeat_digit.py with a model wide enough to be worth timing, for PPO."""

from __future__ import annotations

from pathlib import Path

from recipes.tasks import repeat_digit
from verl_mg.models.tiny_model import make_tiny_model

RECIPE = Path(__file__).parents[1] / "recipes" / "ppo.py"


def make(folder: Path, hidden: int, layers: int) -> None:
    """Writes the data of the task and `model/`.

    Args:
        folder: where to write.
        hidden: width of the model.
        layers: number of its layers.
    """
    repeat_digit.make(folder)
    make_tiny_model(
        folder / "model",
        "qwen3",
        characters=repeat_digit.DIGITS + "=",
        hidden=hidden,
        layers=layers,
        ffn=3 * hidden,
        max_positions=1024,
    )


def overrides(folder: Path, prompts: int = 48, tokens: int = 48) -> list[str]:
    """Returns overrides for PPO with a reference: two epochs of two optimizer steps.

    Args:
        folder: the folder of `make`.
        prompts: prompts of an iteration.
        tokens: most tokens of a response.
    """
    return [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'data' / 'train.jsonl'}",
        f"reward.function={repeat_digit.__file__}:score",
        f"rollout.max_new_tokens={tokens}",
        f"algorithm.prompts_per_iteration={prompts}",
        "algorithm.critic_warmup=0",
        "algorithm.kl.coefficient=0.01",
        "algorithm.num_minibatches=2",
        "algorithm.num_epochs=2",
    ]
