"""Recipes: plain modules with an `iteration(job, cfg)`, found by their path."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_mg.config import RecipeConfig
from verl_mg.errors import UserError
from verl_mg.job.build_models import MODEL_ROLES

ROLES = (*MODEL_ROLES, "rollout", "reward")


@dataclass(frozen=True)
class Recipe:
    """What a recipe's module says: its name, its configuration section, the roles it uses, one iteration."""

    name: str
    config: type[RecipeConfig]
    roles: Callable[[Any], set[str]]
    iteration: Callable[[Any, Any], dict[str, float]]


def load_recipe(path: str | Path) -> Recipe:
    """Import the recipe at `path`; UserError naming it and what it lacks."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file}: no such recipe; give the path of a Python file such as recipes/grpo.py")
    spec = importlib.util.spec_from_file_location(f"recipe_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{file}: a recipe is a Python file, with the ending .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # A recipe imports the pieces beside it as it would if the folder above were the working directory.
    above = str(file.resolve().parents[1])
    if above not in sys.path:
        sys.path.append(above)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{file}: the recipe cannot be imported ({type(error).__name__}: {error})") from error
    return recipe_from_module(module, str(file))


def recipe_from_module(module: ModuleType, name: str) -> Recipe:
    """The recipe that an imported module is; UserError calling it `name` where it lacks something."""
    config = getattr(module, "Config", None)
    if not (isinstance(config, type) and issubclass(config, RecipeConfig)):
        raise UserError(f"{name}: a recipe defines `class Config(RecipeConfig)`, its own section of the configuration")
    for function, arguments in (("roles", "cfg"), ("iteration", "job, cfg")):
        if not callable(getattr(module, function, None)):
            raise UserError(f"{name}: a recipe defines the function {function}({arguments})")
    return Recipe(Path(str(module.__file__)).stem, config, module.roles, module.iteration)


def requested_roles(recipe: Recipe, cfg: Any) -> set[str]:
    """The roles that the recipe asks for under this configuration."""
    roles = set(recipe.roles(cfg))
    if unknown := roles - set(ROLES):
        raise UserError(f"recipe {recipe.name}: no role {sorted(unknown)}; there are {', '.join(ROLES)}")
    if "rollout" in roles and (missing := {"actor", "reward"} - roles):
        raise UserError(f"recipe {recipe.name}: the role rollout needs {' and '.join(sorted(missing))} beside it")
    return roles
