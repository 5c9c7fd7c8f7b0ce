"""Loads recipes: Python modules with a function `iteration(job, cfg)`, given by their path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_mg.config import Config, RecipeConfig
from verl_mg.errors import UserError
from verl_mg.import_function import RECIPES, import_file

MODEL_ROLES = ("actor", "critic", "reward_model", "frozen_reward_model", "process_reward", "reference")
"""Roles with a model, in the order in which they are built."""
TEACHERS = "teachers"
"""Role that has a model role `teachers.NAME` for each teacher of the configuration."""
ROLES = (*MODEL_ROLES, TEACHERS, "rollout", "reward")


@dataclass(frozen=True)
class Recipe:
    """Contents of a recipe's module."""

    name: str
    config: type[RecipeConfig]
    """Class of the configuration section `algorithm`."""
    roles: Callable[[Any], set[str]]
    """Returns the names of the requested roles, given the section `algorithm`."""
    iteration: Callable[[Any, Any], dict[str, float]]
    """Runs one iteration, given the job and the section `algorithm`, and returns its metrics."""


def shipped_file(path: str, folder: Path, suffix: str) -> Path:
    """Returns the file of a path; where there is none, the project's file: for `grpo` or `recipes/grpo.py`.

    The project's files are in `folder` and end with `suffix`. A path that is neither is returned as it is.
    """
    for file in (Path(path), RECIPES.parent / path, folder / f"{path}{suffix}"):
        if file.is_file():
            return file
    return Path(path)


def load_recipe(path: str | Path) -> Recipe:
    """Imports the recipe at `path`, or the project's recipe of this name; UserError if a definition is missing."""
    file = shipped_file(str(path), RECIPES, ".py")
    if not file.is_file():
        raise UserError(f"{file}: no such recipe; give the path of a Python file such as recipes/grpo.py")
    if file.suffix != ".py":
        raise UserError(f"{file}: a recipe is a Python file, with the ending .py")
    # A recipe of a user imports modules of its folder as if the folder above were the working directory.
    above = file.resolve().parents[1]
    if not (file.resolve().is_relative_to(RECIPES) or str(above) in sys.path):
        sys.path.append(str(above))
    try:
        module = import_file(file, f"recipe_{file.stem}")
    except Exception as error:
        raise UserError(f"{file}: the recipe cannot be imported ({type(error).__name__}: {error})") from error
    return recipe_from_module(module, str(file))


def recipe_from_module(module: ModuleType, name: str) -> Recipe:
    """Returns the recipe of an imported module; `name` is for error messages."""
    config = getattr(module, "Config", None)
    if not (isinstance(config, type) and issubclass(config, RecipeConfig)):
        raise UserError(f"{name}: a recipe defines `class Config(RecipeConfig)`, its own section of the configuration")
    for function, arguments in (("roles", "cfg"), ("iteration", "job, cfg")):
        if not callable(getattr(module, function, None)):
            raise UserError(f"{name}: a recipe defines the function {function}({arguments})")
    return Recipe(Path(str(module.__file__)).stem, config, module.roles, module.iteration)


def requested_roles(recipe: Recipe, config: Config) -> set[str]:
    """Returns the roles that the recipe requests, and those that they need."""
    # These are the frozen reward model with `reward.from_model`, and the reference where it is a teacher.
    roles = set(recipe.roles(config.algorithm))
    if unknown := roles - set(ROLES):
        raise UserError(f"recipe {recipe.name}: no role {sorted(unknown)}; there are {', '.join(ROLES)}")
    if "rollout" in roles and "actor" not in roles:
        raise UserError(f"recipe {recipe.name}: the role rollout needs the role actor. Add it to roles(cfg).")
    if "reward" in roles and config.reward.from_model:
        roles.add("frozen_reward_model")
    teachers = config.teachers.values()
    if TEACHERS in roles and (not teachers or any(teacher.weights == "reference" for teacher in teachers)):
        roles.add("reference")
    return roles
