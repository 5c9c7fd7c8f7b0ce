"""Import of a user's function, or of a file, by its name."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_mg.errors import UserError

RECIPES = (Path(__file__).parent / "recipes").resolve()
"""Folder of the package's recipes; in a checkout `verl_mg/recipes` is a link to it."""


def load_function(name: str, kind: str) -> Callable[..., Any]:
    """Imports `package.module:function` or `path/to/file.py:function`; `kind`, such as "reward", is for errors."""
    where, colon, function_name = name.rpartition(":")
    if not (colon and where and function_name):
        raise UserError(
            f"{kind} '{name}': not a function's name. Write package.module:function or path/to/file.py:function."
        )
    module = _imported(where, name, kind)
    function = getattr(module, function_name, None)
    if not callable(function):
        near = _near(function_name, module)
        raise UserError(f"{kind} '{name}': {where} has no function '{function_name}'{near}")
    result: Callable[..., Any] = function
    return result


def _imported(where: str, name: str, kind: str) -> ModuleType:
    try:
        return (
            import_file(Path(where), f"verl_mg_{kind}_file_{Path(where).stem}")
            if where.endswith(".py")
            else importlib.import_module(where)
        )
    except Exception as error:  # a module runs the user's code, which may raise anything
        raise UserError(
            f"{kind} '{name}': {where} cannot be imported ({type(error).__name__}: {error}). Fix it, or "
            "write an importable module or the path of a .py file."
        ) from error


def import_file(path: Path, name: str) -> ModuleType:
    """Imports a file `.py` as module `name`; a file of the package's recipes has one name, `verl_mg.recipes...`."""
    file = path.resolve()
    if file.is_relative_to(RECIPES) and file.is_file():
        return importlib.import_module(".".join(("verl_mg.recipes", *file.relative_to(RECIPES).with_suffix("").parts)))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the suffix .py gives both
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pydantic look the module of a class up by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _near(function_name: str, module: ModuleType) -> str:
    public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = difflib.get_close_matches(function_name, public)
    return f". Write one of: {', '.join(near or public)}." if public else ". Define it there."
