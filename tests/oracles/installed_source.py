"""Functions of an installed package, compiled from its source without importing the package."""

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.machine import VLLM_PYTHON


def installed_functions(package: str, file: str, *names: str, **known: Any) -> dict[str, Callable[..., Any]]:
    """Functions of a file whose other imports need a GPU or take seconds; skips where the package is missing."""
    folder = folder_of_package(package)
    if folder is None:
        pytest.skip(f"{package} is not installed")
    source = Path(folder, file).read_text(encoding="utf-8")
    wanted = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name in names]
    for function in wanted:
        function.decorator_list, function.returns = [], None
        for argument in (*function.args.args, *function.args.kwonlyargs):
            argument.annotation = None
    assert {function.name for function in wanted} == set(names)
    namespace = dict(known)
    exec(compile(ast.Module(wanted, []), file, "exec"), namespace)
    return {name: namespace[name] for name in names}


def folder_of_package(package: str) -> Path | None:
    """Where a package is installed: in this environment, or in vLLM's."""
    found = importlib.util.find_spec(package)
    if found is not None and found.submodule_search_locations:
        return Path(found.submodule_search_locations[0])
    return next(VLLM_PYTHON.parents[1].glob(f"lib/*/site-packages/{package}"), None)
