"""Import of a user's function by its name."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_mg.errors import UserError


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
        return _from_file(Path(where), kind) if where.endswith(".py") else importlib.import_module(where)
    except Exception as error:  # a module runs the user's code, which may raise anything
        raise UserError(
            f"{kind} '{name}': {where} cannot be imported ({type(error).__name__}: {error}). Fix it, or "
            "write an importable module or the path of a .py file."
        ) from error


def _from_file(path: Path, kind: str) -> ModuleType:
    module_name = f"verl_mg_{kind}_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # the suffix .py gives both
    module = importlib.util.module_from_spec(spec)
    # Dataclasses of the file look their module up by name.
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def _near(function_name: str, module: ModuleType) -> str:
    public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = difflib.get_close_matches(function_name, public)
    return f". Write one of: {', '.join(near or public)}." if public else ". Define it there."
