"""Packages form layers, import only from lower layers and keep no state in modules: checked by reading the code.

Imports inside functions and under TYPE_CHECKING count like any other.
"""

import ast
import functools
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "verl_mg"

PACKAGES = (
    "errors lazy_import dtypes device choice images pending_column batch jsonl phase_timer"
    " hub http_client import_function library quick_imports config layout stores",
    "models algorithms sandbox",
    "sharding distributed data rewards",
    "reshard checkpoint",
    "training engines",
    "tracing megatron fsdp agents servers rows",
    "weight_sync planner",
    "roles",
    "rollout",
    "job",
    "monitor run",
    "cli api launch view quickstart doctor support evaluation from_verl __main__",
)
"""Packages of each layer, the lowest first."""
LAYERS = {package: layer for layer, packages in enumerate(PACKAGES) for package in packages.split()}
SAME_LAYER = {
    ("batch", "images"),
    ("batch", "pending_column"),
    ("config", "layout"),
    ("config", "stores"),
    ("stores", "jsonl"),
    ("phase_timer", "device"),
    ("run", "monitor"),
    ("__main__", "cli"),
    *(("cli", module) for module in ("launch", "quickstart", "view", "doctor", "support", "evaluation", "from_verl")),
}
"""Imports within a layer: (importing package, imported package)."""
PATCHES_OTHERS = "megatron/cpu_shim.py"
"""The file that may change modules, because it patches torch and megatron-core."""
MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
"""Methods that change a container."""


def violations(package: Path) -> list[str]:
    """One line for each package without a layer, and for each import that is not from a lower layer."""
    return [line for file in sorted(package.rglob("*.py")) for line in _of_file(package, file)]


def _of_file(package: Path, file: Path) -> Iterator[str]:
    parts = file.relative_to(package).with_suffix("").parts
    here = parts[0]
    if here != "__init__" and here not in LAYERS:
        yield f"{file}: {here} has no layer; give it one in {Path(__file__).name}"
        return
    for name, line in imports(file, package):
        there = name.split(".")[1]
        if there not in LAYERS:
            yield f"{file}:{line}: {name} has no layer; give {there} one in {Path(__file__).name}"
        elif here != there and not _may_import(here, there):
            yield f"{file}:{line}: {here} imports {name}, which is not in a lower layer"


def _may_import(here: str, there: str) -> bool:
    if here == "__init__":  # imported with each of its parts, so it imports none
        return False
    return there in ("errors", "lazy_import", "dtypes") or LAYERS[there] < LAYERS[here] or (here, there) in SAME_LAYER


def imports(file: Path, package: Path) -> Iterator[tuple[str, int]]:
    """Dotted names below `package` that a file imports, each with its line."""
    parents = (package.name, *file.relative_to(package).parent.parts)
    for node in _imports(file):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else ()
            source = ".".join([*base, *([node.module] if node.module else [])])
            parts = [f"{source}.{name}" for name in names if _is_part(package, name)]
            names = parts if source == package.name else [source]
        for name in names:
            if name.startswith(f"{package.name}."):
                yield name, node.lineno


def mutual_imports(package: Path) -> list[str]:
    """One line for each two parts of the package, or folders in one of its folders, that import each other."""
    parents = [package, *(file.parent for file in sorted(package.rglob("*/__init__.py")))]
    return [line for parent in parents for line in _mutual(package, parent)]


def _mutual(package: Path, parent: Path) -> Iterator[str]:
    prefix = ".".join((package.name, *parent.relative_to(package).parts, ""))
    parts = {file.stem for file in parent.iterdir() if parent == package or file.is_dir()}
    pairs = {
        (file.relative_to(parent).with_suffix("").parts[0], name.removeprefix(prefix).split(".")[0])
        for file in parent.rglob("*.py")
        for name, _ in imports(file, package)
        if name.startswith(prefix)
    }
    for here, there in sorted(pairs):
        if here < there and (there, here) in pairs and {here, there} <= parts:
            yield f"{prefix}{here} and {prefix}{there} import each other"


def _is_part(package: Path, name: str) -> bool:
    return name in LAYERS or (package / name).is_dir() or (package / f"{name}.py").is_file()


def _foreign(part: str) -> set[str]:
    """Full names of everything that a part of the package imports from outside."""
    files = (PACKAGE / part).rglob("*.py")
    nodes = [node for file in files for node in _imports(file)]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    sources = [(node.module or "", node.names) for node in nodes if isinstance(node, ast.ImportFrom)]
    named = {f"{source}.{alias.name}" for source, aliases in sources for alias in aliases}
    return {name for name in plain | named if not name.startswith(f"{PACKAGE.name}.")}


def changed_globals(package: Path) -> list[str]:
    """One line for each place in a function that changes a variable of its module."""
    files = sorted(set(package.rglob("*.py")) - {package / PATCHES_OTHERS})
    return [f"{file}:{line}: {name}" for file in files for name, line in _read(file.read_text(encoding="utf-8"))[1]]


@functools.cache
def _read(source: str) -> tuple[list[ast.Import | ast.ImportFrom], list[tuple[str, int]]]:
    """Parses a module once for all tests: its imports, and variables that its functions change, with the lines."""
    module = ast.parse(source)
    return [node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom)], list(_changes(module))


def _imports(file: Path) -> list[ast.Import | ast.ImportFrom]:
    return _read(file.read_text(encoding="utf-8"))[0]


def _changes(module: ast.Module) -> Iterator[tuple[str, int]]:
    assigned = [node for node in module.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [target for node in assigned for target in getattr(node, "targets", [getattr(node, "target", None)])]
    names = {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        nodes = list(ast.walk(function))
        local = {arg.arg for arg in nodes if isinstance(arg, ast.arg)} | {
            node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        for node in nodes:
            if isinstance(node, ast.Global):
                yield from ((name, node.lineno) for name in node.names)
            elif (changed := _changed(node)) in names - local:
                yield changed, node.lineno


def _changed(node: ast.AST) -> str:
    """Name of the container that an item assignment or a method call changes; otherwise empty."""
    container: ast.expr | None = None
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        container = node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        container = node.func.value
    return container.id if isinstance(container, ast.Name) else ""


def test_package_imports_follow_the_layers():
    assert violations(PACKAGE) == []


def test_package_changes_no_variable_of_a_module():
    assert changed_globals(PACKAGE) == []


def test_no_two_packages_import_each_other():
    assert mutual_imports(PACKAGE) == []


def test_files_import_each_other_in_no_circle():
    files = {
        file.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", "."): file
        for file in PACKAGE.rglob("*.py")
    }
    graph = {
        name: {part for part in _modules(file) if part in files}
        for name, file in files.items()
        if file.name != "__init__.py"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def _modules(file: Path) -> Iterator[str]:
    for node in _imports(file):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_layout_imports_only_the_standard_library():
    roots = {name.split(".")[0] for name in _foreign("layout")}
    assert roots and roots <= sys.stdlib_module_names


def test_algorithms_import_nothing_of_distributed():
    names = _foreign("algorithms")
    assert "torch" in names
    assert not [name for name in names if name.startswith(("torch.distributed", "torch.multiprocessing"))]


@pytest.fixture
def package(tmp_path) -> Path:
    files = {
        "__init__.py": "__version__ = '1'\n",
        "errors.py": "",
        "batch.py": "from verl_mg.errors import UserError\nfrom verl_mg import __version__\n",
        "config.py": "import verl_mg.layout\nimport os, yaml\n",
        "layout/__init__.py": "from verl_mg.layout.layout import Layout\n",
        "layout/layout.py": "from ..errors import UserError\n",
        "reshard/plan.py": "from verl_mg import layout\nfrom . import execute\nfrom .execute import run\n",
        "reshard/execute.py": "",
        "cli.py": "from verl_mg.reshard import plan\n",
    }
    for name, text in files.items():
        write(tmp_path / "verl_mg" / name, text)
    return tmp_path / "verl_mg"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_violations_of_sound_package_are_empty(package):
    assert violations(package) == [] and mutual_imports(package) == []


@pytest.mark.parametrize(
    ("files", "pair"),
    [
        ("layout/layout.py: from verl_mg.config import Config", "config and verl_mg.layout"),
        ("run/loop.py: import verl_mg.monitor.log; monitor/log.py: from ..run import loop", "monitor and verl_mg.run"),
        (
            "engines/hf/a.py: import verl_mg.engines.vllm; engines/vllm/b.py: from ..hf import a",
            "engines.hf and verl_mg.engines.vllm",
        ),
    ],
)
def test_two_packages_that_import_each_other_are_named(package, files, pair):
    for name, text in (file.split(": ") for file in files.split("; ")):
        write(package / name, text)
        write(package / Path(name).parts[0] / "__init__.py", "")
    assert mutual_imports(package) == [f"verl_mg.{pair} import each other"]


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("layout/layout.py", "import verl_mg.reshard.plan", "layout imports verl_mg.reshard.plan"),
        ("reshard/plan.py", "def f():\n    from verl_mg.roles.models import Actor", "imports verl_mg.roles.models"),
        ("reshard/plan.py", "if TYPE_CHECKING:\n    from verl_mg import job", "plan.py:2: reshard imports verl_mg.job"),
        ("reshard/plan.py", "from verl_mg.planner import math", "reshard imports verl_mg.planner"),
        ("reshard/plan.py", "from ..monitor import loader", "reshard imports verl_mg.monitor"),
        ("reshard/deep/plan.py", "from ...rollout import x", "reshard imports verl_mg.rollout"),
        ("reshard/plan.py", "from .. import megatron", "reshard imports verl_mg.megatron"),
        ("layout/layout.py", "from verl_mg.config import Config", "layout imports verl_mg.config"),
        ("batch.py", "from verl_mg.layout import Layout", "batch imports verl_mg.layout"),
        ("errors.py", "import verl_mg.batch as b", "errors imports verl_mg.batch"),
        ("__init__.py", "from verl_mg.batch import Batch", "__init__ imports verl_mg.batch"),
        ("attic/old.py", "", "attic has no layer; give it one"),
        ("attic.py", "", "attic has no layer; give it one"),
        ("cli.py", "from verl_mg.attic import x", "verl_mg.attic has no layer"),
    ],
)
def test_violations_of_changed_package_name_the_import(package, file, text, complaint):
    write(package / file, text)
    (violation,) = violations(package)
    assert complaint in violation


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("_seen = {}\ndef f(x):\n    _seen[x] = 1", ["_seen"]),
        ("_seen: set[int] = set()\nclass A:\n    def f(self, x):\n        _seen.add(x)", ["_seen"]),
        ("_count = 0\ndef f():\n    global _count\n    _count += 1", ["_count"]),
        ("LIMITS = {1: 2}\ndef f():\n    del LIMITS[1]", ["LIMITS"]),
        ("LIMITS = {1: 2}\ndef f(x):\n    return LIMITS[x]", []),
        ("seen = {}\ndef f(seen):\n    seen[1] = 2", []),
        ("table = {}\ntable[1] = 2", []),
    ],
)
def test_changed_globals_of_changed_package_name_the_variable(package, text, changed):
    write(package / "batch.py", text)
    assert [line.rsplit(": ", 1)[1] for line in changed_globals(package)] == changed
