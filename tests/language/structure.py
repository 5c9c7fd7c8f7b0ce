"""Rules about docstrings, fields and the names of tests, which read the syntax tree of a module."""

import ast
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.language.words import Violation, banned_name

MIN_SUMMARY = 25
FRAGMENTS = re.compile(
    r"(?:Of|See|What|Whatever|Who|Whose|Whoever|Which|That|Those|Where|How)\b"
    r"|(?:To be|The way|Whether this|As|Nor|Or|And|But|Takes|Notes)\b"
)
LOWERCASE_NAMES = re.compile(
    r"(?:torch|megatron|numpy|pip|vllm|verl|safetensors|k8s|kubectl|mpirun|torchrun|pydantic)\b"
)
PRIVATE_CALLS = {"field_validator", "model_validator", "field_serializer", "model_serializer", "overload", "override"}
EXTERNAL_OVERRIDES = {
    *("forward", "backward", "setup_context", "step", "state_dict", "load_state_dict", "sharded_state_dict"),
    *("emit", "log_message", "do_GET", "do_POST", "model_post_init", "set_input_tensor", "handle_starttag"),
}
INTERFACES = (
    *("recipes", "verl_mg/api.py", "verl_mg/batch.py", "verl_mg/algorithms"),
    *(f"verl_mg/data/{name}.py" for name in ("prompt_feed", "reading", "records", "training_rows")),
    *(f"verl_mg/rewards/{name}.py" for name in ("classifier", "code", "dapo", "gsm8k", "ifeval", "reasoning_gym")),
    *(f"verl_mg/rewards/{name}.py" for name in ("__init__", "choice", "regex_format", "reward", "service")),
    "verl_mg/rewards/sandbox_fusion.py",
    *("verl_mg/job/job.py", "verl_mg/roles/models.py", "verl_mg/agents/tools/builtin.py"),
    *("verl_mg/reshard/plan.py", "verl_mg/reshard/schedule.py", "verl_mg/reshard/execute.py"),
    "verl_mg/sharding/weight_table.py",
)
"""Files and folders that others call or implement: their functions describe arguments, results and errors."""
PRIVATE_CHAIN = re.compile(r"(?<![\w.\"'])([a-zA-Z]\w*)(?:\.\w+)*?\._[a-z]\w*(?:\.[a-z]\w*)*\._[a-z]\w*")
PRIVATE_CHAINS_LEFT = ("job.rollout._engines._follower", "engines._sync._planned")
"""Parts of engines on several nodes, and a kept plan: their owners have nothing public yet."""
SECTION = re.compile(r"(?m)^(Args|Returns|Raises|Yields):\s*$")
RECIPE_PARAMETERS = {"job", "cfg", "config", "inputs", "tokens", "batch", "metrics"}
TEST_NAME_STARTS = frozenset(
    """
    nor or it its and but that what whatever whoever who whose whom which then so also neither yet where when while
    if this these those they there else otherwise still as even not nobody somebody he she his her either both than to
    of
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class ClassInfo:
    """Bases and methods of a class, for the question whether a method overrides a documented one."""

    bases: tuple[str, ...]
    methods: Mapping[str, tuple[tuple[str, ...], bool]]

    @functools.cached_property
    def is_interface(self) -> bool:
        return any(base in ("Protocol", "ABC") for base in self.bases)


Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


def check_docstrings(file: Path, nodes: Iterable[ast.AST]) -> Iterator[Violation]:
    for node in nodes:
        if isinstance(node, Documented):
            docstring = ast.get_docstring(node)
            if docstring:
                yield from _check_summary(file, node, docstring)
            if isinstance(node, ast.ClassDef) and docstring:
                yield from _check_field_list(file, node, docstring)
        for text in _attribute_docstrings(node):
            complaint = _fragment(text.value.value.strip())  # type: ignore[attr-defined]
            if complaint:
                yield Violation(file, text.lineno, "docstring", complaint)


def _check_summary(file: Path, node: Documented, docstring: str) -> Iterator[Violation]:
    line, name = (1, "") if isinstance(node, ast.Module) else (node.lineno, node.name)
    summary = docstring.splitlines()[0]
    complaint = _fragment(summary)
    if complaint:
        yield Violation(file, line, "docstring", complaint)
    elif not name.startswith("_") and len(summary) < MIN_SUMMARY:
        yield Violation(file, line, "docstring", f"under {MIN_SUMMARY} characters: {summary}")


def _fragment(summary: str) -> str | None:
    if FRAGMENTS.match(summary):
        return f"starts with a clause, not with what it is or does: {summary.splitlines()[0]}"
    if summary[:1].islower() and not LOWERCASE_NAMES.match(summary):
        return f"starts in lower case: {summary.splitlines()[0]}"
    return None


def _check_field_list(file: Path, node: ast.ClassDef, docstring: str) -> Iterator[Violation]:
    body = docstring.split("Attributes:")[0]
    parts = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
    for field in [target.id for target in parts if isinstance(target, ast.Name)]:
        if re.search(rf"(?:^|[\s`]){field}`?: ", body):
            yield Violation(
                file, node.lineno, "docstring", f"{node.name} describes {field} in its text; put it below the field"
            )


def _attribute_docstrings(node: ast.AST) -> Iterator[ast.Expr]:
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    for before, part in itertools.pairwise(body):
        if isinstance(before, ast.Assign | ast.AnnAssign) and _is_text(part):
            yield part


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_interface_file(file: Path) -> bool:
    if Path("recipes/environments") in file.parents:
        return False
    return any(Path(place) == file or Path(place) in file.parents for place in INTERFACES)


def check_args(file: Path, tree: ast.Module, classes: Mapping[str, list[ClassInfo]]) -> Iterator[Violation]:
    if is_interface_file(file):
        yield from _check_missing_args(file, tree, classes)
    else:
        yield from _check_needless_sections(file, tree)


def _check_missing_args(file: Path, tree: ast.Module, classes: Mapping[str, list[ClassInfo]]) -> Iterator[Violation]:
    for owner, function in _public_functions(tree):
        names = _parameters(function, owner)
        if len(names) < 2 or _is_exempt(file, owner, function, names, classes):
            continue
        described = _described_args(ast.get_docstring(function) or "")
        missing = [name for name in names if name not in described]
        if missing:
            yield Violation(file, function.lineno, "args", f"{function.name} does not describe {', '.join(missing)}")


def _check_needless_sections(file: Path, tree: ast.Module) -> Iterator[Violation]:
    of_interfaces = {
        part
        for node in statements(tree)
        if isinstance(node, ast.ClassDef) and _is_interface(node)
        for part in node.body
    }
    for node in statements(tree):
        if isinstance(node, Function) and node not in of_interfaces:
            section = SECTION.search(ast.get_docstring(node) or "")
            if section:
                yield Violation(
                    file, node.lineno, "args", f"{node.name} is not an interface: a sentence instead of {section[1]}"
                )


def _public_functions(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, Function]]:
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield None, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from (
                (node, part) for part in node.body if isinstance(part, Function) and not part.name.startswith("_")
            )


def _parameters(function: Function, owner: ast.ClassDef | None) -> list[str]:
    args = function.args
    names = [arg.arg for arg in [*args.posonlyargs, *args.args]]
    if owner and "staticmethod" not in _decorators(function):
        names = names[1:]
    names += [arg.arg for arg in args.kwonlyargs]
    return [*names, *(arg.arg for arg in (args.vararg, args.kwarg) if arg)]


def _decorators(function: Function) -> set[str]:
    parts = [part.func if isinstance(part, ast.Call) else part for part in function.decorator_list]
    return {
        part.id if isinstance(part, ast.Name) else part.attr
        for part in parts
        if isinstance(part, ast.Name | ast.Attribute)
    }


def _is_exempt(
    file: Path, owner: ast.ClassDef | None, function: Function, names: list[str], classes: Mapping[str, list[ClassInfo]]
) -> bool:
    if PRIVATE_CALLS & _decorators(function):
        return True
    if owner is None:
        is_recipe = file.parts[:1] == ("recipes",) and len(file.parts) == 2
        return is_recipe and len(set(names) - RECIPE_PARAMETERS) <= 1
    if function.name in EXTERNAL_OVERRIDES:
        return True
    bases = _all_bases(owner, classes)
    interfaces = [info for infos in classes.values() for info in infos if info.is_interface]
    overridden = [*bases, *(() if owner.name in classes and _is_interface(owner) else interfaces)]
    methods = [info.methods.get(function.name, ((), False)) for info in overridden]
    return any(documented and set(names) <= set(parameters) for parameters, documented in methods)


def _is_interface(node: ast.ClassDef) -> bool:
    return any(base in ("Protocol", "ABC") for base in _base_names(node))


def _all_bases(node: ast.ClassDef, classes: Mapping[str, list[ClassInfo]]) -> list[ClassInfo]:
    pending, seen, result = list(_base_names(node)), {node.name}, []
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            result += classes.get(name, [])
            pending += [base for info in classes.get(name, []) for base in info.bases]
    return result


def _base_names(node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        part = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(part, ast.Name | ast.Attribute):
            yield part.id if isinstance(part, ast.Name) else part.attr


def _described_args(docstring: str) -> set[str]:
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", docstring, re.MULTILINE | re.DOTALL)
    entries = re.findall(r"(?m)^ +([*`\w, /]+?)(?: \([^)]*\))?:(?:\s|$)", section[1]) if section else []
    return {name for entry in entries for name in re.findall(r"\w+", entry)}


def check_fields(file: Path, nodes: Iterable[ast.AST], classes: Mapping[str, list[ClassInfo]]) -> Iterator[Violation]:
    for node in nodes:
        if not isinstance(node, ast.ClassDef) or not _is_section(node, classes):
            continue
        for part, below in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
            if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name) or _is_text(below):
                continue
            if "ClassVar" not in ast.unparse(part.annotation) and not part.target.id.startswith("_"):
                yield Violation(file, part.lineno, "field", f"{node.name}.{part.target.id} has no docstring below it")


def _is_section(node: ast.ClassDef, classes: Mapping[str, list[ClassInfo]]) -> bool:
    bases = {*_base_names(node), *(base for info in _all_bases(node, classes) for base in info.bases)}
    return bool(bases & {"ConfigSection", "RecipeConfig"})


def check_tests(file: Path, text: str, nodes: Sequence[ast.AST]) -> Iterator[Violation]:
    modules = {(alias.asname or alias.name).split(".")[0] for node in nodes for alias in _aliases(node)}
    for number, line in enumerate(text.splitlines(), 1):
        for chain in PRIVATE_CHAIN.finditer(line):
            if chain[1] not in modules and chain[0] not in PRIVATE_CHAINS_LEFT:
                yield Violation(file, number, "private", f"{chain[0]}: test what is public, or one layer lower")
    for node in nodes:
        if isinstance(node, ast.ImportFrom | ast.Import):
            sources = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in [*sources, *(alias.name for alias in node.names)]:
                if name.split(".")[-1].startswith("test_") or name.split(".")[-1] == "conftest":
                    yield Violation(
                        file, node.lineno, "test-import", f"imports from {name}; move what is shared to a helper"
                    )
        elif isinstance(node, Function) and node.name.startswith("test_") and file.stem.startswith("test_"):
            words = node.name.split("_")[1:]
            if words[0] in TEST_NAME_STARTS or len(words) < 3:
                yield Violation(
                    file, node.lineno, "test-name", f"{node.name} is not test_<unit>_<condition>_<expectation>"
                )
            elif banned_name(node.name, file):
                yield Violation(file, node.lineno, "word", f"the name {node.name}")


def _aliases(node: ast.AST) -> list[ast.alias]:
    return node.names if isinstance(node, ast.Import | ast.ImportFrom) else []


def class_index(sources: list[str]) -> dict[str, list[ClassInfo]]:
    classes: dict[str, list[ClassInfo]] = {}
    for source in sources:
        for node in statements(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                methods = {
                    part.name: (tuple(_parameters(part, node)), bool(ast.get_docstring(part)))
                    for part in node.body
                    if isinstance(part, Function)
                }
                classes.setdefault(node.name, []).append(ClassInfo(tuple(_base_names(node)), methods))
    return classes


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements of a tree, those of its classes and functions included."""
    # Nine of ten nodes are parts of expressions.
    pending = [tree]
    while pending:
        node = pending.pop()
        for blocks in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, blocks, ())
            pending += inner if isinstance(inner, list) else ()
        if isinstance(node, ast.stmt):
            yield node
