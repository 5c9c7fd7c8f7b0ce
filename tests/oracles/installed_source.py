"""Functions of an installed package, compiled from its source without importing the package."""

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def installed_functions(package: str, file: str, *names: str, **known: Any) -> dict[str, Callable[..., Any]]:
    """Functions of a file whose other imports need a GPU or take seconds; skips where the package is missing."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    source = Path(found.submodule_search_locations[0], file).read_text(encoding="utf-8")
    wanted = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name in names]
    for function in wanted:
        function.decorator_list, function.returns = [], None
        for argument in (*function.args.args, *function.args.kwonlyargs):
            argument.annotation = None
    assert {function.name for function in wanted} == set(names)
    namespace = dict(known)
    exec(compile(ast.Module(wanted, []), file, "exec"), namespace)
    return {name: namespace[name] for name in names}
