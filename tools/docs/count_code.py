"""Counts what a reader of a tree meets: lines, files, names, and how many files a configuration key passes.

python -m tools.docs.count_code --tree BEFORE --tree AFTER
"""

import argparse
import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ENGINE_COMPARISON = re.compile(r"""\b(?:engine|backend)\s*(?:==|!=|in|not in)\s*["'(]""")
MANY = 8
"""A function with more parameters than that counts."""
KEYS = {
    "rollout.keep_kv_cache": {"keep_kv_cache", "keep_cache", "keeps_cache"},
    "actor.recompute": {"recompute"},
}
"""Names under which a key travels. A file counts if one of them, with or without `_`, is a variable, a parameter, a
keyword or an attribute in it."""
OTHER_ROUTES = ("fsdp/", "vllm/", "servers/", "remote_", "planner/", "cli.py")
"""Files that a key does not pass in a job with Megatron and SGLang; the planner has inputs of the same names."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", action="append", type=Path, help="a checkout (default: this one)")
    trees = [tree.resolve() for tree in parser.parse_args().tree or [Path(__file__).parents[2]]]
    counted = [counts(tree) for tree in trees]
    print(f"{'':44}" + "".join(f"{tree.parent.name + '/' + tree.name:>16}" for tree in trees))
    for name in counted[0]:
        print(f"{name:44}" + "".join(f"{count[name]:16,}" for count in counted))


def counts(tree: Path) -> dict[str, int]:
    """Every figure of a tree by its name."""
    texts = [file.read_text(encoding="utf-8") for file in files(tree, "verl_mg")]
    modules = [ast.parse(text) for text in texts]
    lengths = [text.count("\n") for text in texts]
    nodes = [node for module in modules for node in ast.walk(module)]
    of = sum(map(kinds, texts, modules), Counter())
    places = [file.relative_to(tree).as_posix() for file in files(tree, "verl_mg")]
    routed = zip(places, modules, strict=True)
    names = [identifiers(module) for place, module in routed if not any(other in place for other in OTHER_ROUTES)]
    return {
        "verl_mg: files": len(texts),
        "verl_mg: lines": sum(lengths),
        "verl_mg: median lines of a file": int(statistics.median(lengths)),
        **{f"verl_mg: lines of {kind}": of[kind] for kind in ("code", "docstrings", "comments")},
        "public functions, classes and methods": sum(map(public_names, modules)),
        "comparisons of an engine's or backend's name": sum(len(ENGINE_COMPARISON.findall(text)) for text in texts),
        f"functions with more than {MANY} parameters": sum(parameters(node) > MANY for node in nodes),
        **{f"files that {key} passes": sum(bool(used & of) for used in names) for key, of in KEYS.items()},
        **{f"{part}: lines": lines(tree, part) for part in ("recipes", "tests", "tools")},
    }


def files(tree: Path, part: str) -> list[Path]:
    return sorted(file for file in (tree / part).rglob("*.py") if "__pycache__" not in file.parts)


def lines(tree: Path, part: str) -> int:
    return sum(file.read_text(encoding="utf-8").count("\n") for file in files(tree, part))


def kinds(text: str, module: ast.Module) -> Counter[str]:
    """Lines of docstrings, also below fields and constants, of comments, of code, and blank ones."""
    strings = [node.value for node in ast.walk(module) if isinstance(node, ast.Expr)]
    strings = [each for each in strings if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    documented = {line for each in strings for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)}
    result: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        start = line.strip()[:1]
        kind = "docstrings" if number in documented else "code" if start not in ("", "#") else "comments"
        result[kind if start or number in documented else "blank"] += 1
    return result


def public_names(module: ast.Module) -> int:
    return sum(1 for _ in _public(module.body, True))


def _public(body: list[ast.stmt], classes: bool) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if classes and isinstance(node, ast.ClassDef):
                yield from _public(node.body, False)


def parameters(node: ast.AST) -> int:
    """Parameters of a function without `self` and `cls`."""
    if not isinstance(node, Function):
        return 0
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(each.arg not in ("self", "cls") for each in named)


def identifiers(module: ast.Module) -> set[str]:
    """Variables, parameters, keywords and attributes of a module, without leading underscores."""
    used: set[str | None] = set()
    for node in ast.walk(module):
        used.add(getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None))
    return {name.lstrip("_") for name in used if isinstance(name, str)}


if __name__ == "__main__":
    main()
