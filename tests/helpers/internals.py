"""What an installed library lacks of the internals that files use, by their imports and their requests to SGLang.

Runs in the library's environment as `python -m tests.helpers.internals PACKAGE FILE...`, and prints a JSON list.
"""

import ast
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

REQUESTS = "sglang.srt.managers.io_struct"


def missing_internals(python: str, package: str, *files: Path) -> list[str]:
    """One line for each part that is missing, in the environment of an interpreter."""
    return printed(python, __name__, package, *map(str, files))


def printed(python: str, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> Any:
    """What a module prints in its last line, as JSON, under an interpreter."""
    done = subprocess.run([python, "-m", module, *arguments], env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def missing_imports(package: str, tree: ast.Module) -> Iterator[str]:
    """Names that a file imports from the package and that are not there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            for alias in node.names:
                if not _has(str(node.module), alias.name):
                    yield f"{node.module}.{alias.name}"


def missing_requests(tree: ast.Module) -> Iterator[str]:
    """Requests, and their fields, that a file makes by the name of the class and that SGLang does not have."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        texts = [part.value for part in call.args if isinstance(part, ast.Constant)]
        kinds = [text for text in texts if isinstance(text, str) and text.endswith("ReqInput")]
        if kinds:
            if not _has(REQUESTS, kinds[0]):
                yield f"{REQUESTS}.{kinds[0]}"
                continue
            known = inspect.signature(getattr(importlib.import_module(REQUESTS), kinds[0])).parameters
            yield from (f"{kinds[0]}.{field.arg}" for field in call.keywords if field.arg and field.arg not in known)


def _has(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


def main() -> None:
    """Prints what is missing, with the version of the library in front."""
    package, *files = sys.argv[1:]
    version = importlib.import_module(package).__version__
    trees = [ast.parse(Path(file).read_text(encoding="utf-8")) for file in files]
    found = [name for tree in trees for name in missing_imports(package, tree)]
    found += [name for tree in trees for name in missing_requests(tree)] if package == "sglang" else []
    print(json.dumps([f"{package} {version} has no {name}" for name in found]))


if __name__ == "__main__":
    main()
