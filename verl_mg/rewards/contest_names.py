"""Names that contests define before a program runs, for the sandbox: sent there as text in front of a harness.

Starter code of LeetCode's form, `def total(self, nums: List[int])`, uses them without importing them. The graders of
LiveCodeBench (lcb_runner/evaluation/testing_util.py) and of APPS import these modules.
"""

import ast
import builtins
import importlib
import sys
import types
from typing import Any

# Whose names are defined; of equal names that of the last one, so that `pow` and `open` stay the builtin ones. The
# name of a module is the module: `time.time()`, `bisect.bisect()`.
MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "time", "decimal", "fractions", "typing", "builtins",
)  # fmt: skip
NUMPY = ("np", "numpy")  # names of a module that starts slowly, only for programs that use them
RECURSION_LIMIT = 50_000  # of LiveCodeBench's grader


def solution(program: str, name: str, with_names: bool) -> dict[str, Any]:
    """Runs a program as the module `name` and returns its namespace."""
    # Registered by its name: `dataclass` looks up the module of a class in sys.modules.
    module = types.ModuleType(name)
    sys.modules[name] = module
    space = vars(module)
    code = compile(program, "solution.py", "exec", dont_inherit=True)
    if with_names:
        sys.setrecursionlimit(RECURSION_LIMIT)
    if with_names and (unknown := names_without_definition(program)):
        modules = {each: importlib.import_module(each) for each in MODULES}
        for each in modules.values():
            public = getattr(each, "__all__", [name for name in vars(each) if not name.startswith("_")])
            space |= {name: getattr(each, name) for name in public}
        space |= modules | {each: importlib.import_module("numpy") for each in NUMPY if each in unknown}
    exec(code, space)
    return space


def names_without_definition(program: str) -> set[str]:
    """Returns the names that a program reads and defines nowhere."""
    read: set[str] = set()
    defined = set(dir(builtins))
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
            defined.add(node.name or "")
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
    return read - defined
