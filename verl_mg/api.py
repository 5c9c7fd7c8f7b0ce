"""Python interface of a job: configuration sections as arguments, the reward as a function.

# my_job.py, started by: python -m verl_mg.launch --nproc-per-node 2 my_job.py
from verl_mg.recipes import grpo
from verl_mg.api import Job

def reward(sample):
    return float(sample.response.strip() == sample.answer)

job = Job(actor="path/to/model", data="train.jsonl", reward=reward, rollout={"max_new_tokens": 64})
job.run(grpo, iterations=100, group_size=8)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_mg.config import Config
    from verl_mg.job.recipe import Recipe


class Job:
    """Job described in Python instead of a configuration file.

    Args:
        actor: the model's directory, or the section `actor` with the directory as `path`.
        data: the training file or folder, or the section `data`.
        reward: a function of a `Sample`, or the section `reward`.
        output: folder of the run.
        sections: further sections of the configuration, such as `rollout={"max_new_tokens": 64}`.
    """

    def __init__(
        self,
        *,
        actor: str | Path | Mapping[str, Any],
        data: str | Path | Mapping[str, Any],
        reward: Callable[..., Any] | Mapping[str, Any] | None = None,
        output: str | Path = "runs/job",
        **sections: Mapping[str, Any],
    ) -> None:
        role = dict(actor) if isinstance(actor, Mapping) else {"path": actor}
        model = {"path": role.pop("path")} if "path" in role else {}
        tree = {name: dict(section) for name, section in sections.items()}
        tree["model"] = model | tree.get("model", {})
        tree["actor"] = role
        tree["data"] = dict(data) if isinstance(data, Mapping) else {"train": data}
        if reward is not None:
            tree["reward"] = dict(reward) if isinstance(reward, Mapping) else {"function": reward}
        tree["job"] = {"output": output} | tree.get("job", {})
        self._tree = tree

    def run(self, recipe: ModuleType | str | Path, *, iterations: int, **algorithm: Any) -> None:
        """Runs all iterations of a recipe. All ranks call it, once in a process.

        Invalid input ends the process with exit code 2 and one line on one rank.

        Args:
            recipe: module of the recipe, or path of its file.
            iterations: iterations to run.
            algorithm: keys of the recipe's section.
        """
        from verl_mg.run.main import run_recipe

        # `run_recipe` calls it after the ranks have met, so that one of them reports an invalid configuration for all.
        def load() -> tuple[Recipe, Config]:
            from verl_mg.config import validate_config
            from verl_mg.job.recipe import load_recipe, recipe_from_module

            loaded = (
                recipe_from_module(recipe, recipe.__name__) if isinstance(recipe, ModuleType) else load_recipe(recipe)
            )
            job = {**self._tree["job"], "iterations": iterations}
            return loaded, validate_config({**self._tree, "job": job, "algorithm": algorithm}, "Job", loaded.config)

        run_recipe(load)
