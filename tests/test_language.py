"""Checks the language of code, documentation and test names against CONTRIBUTING.md.

Run it on some paths with `python tests/test_language.py PATH...`: one line for each violation, `file:line: rule: text`.

Rules:
    word: a word of no technical meaning here ("room", "told"), in a name, docstring, comment, message or document.
    docstring: a first line that is a fragment, a relative clause or too short; a list of fields inside the text.
    args: a public function with two or more parameters whose docstring has no `Args:` that names each of them.
    field: a configuration field without a docstring below it.
    heading: a Markdown heading that is a relative clause.
    test-name: a test that is not named test_<unit>_<condition>_<expectation>.
    test-import: a module of the tests that imports from another test module or from a conftest.
"""

from __future__ import annotations

import ast
import functools
import io
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
CHECKED = ("verl_mg", "recipes", "tools", "launch", "docs", "tests", "README.md", "CONTRIBUTING.md")
TEXT_SUFFIXES = {".md", ".yaml", ".sh", ".sbatch", ".toml", ".ini", ".js", ".html", ".css"}
RULES = ("word", "docstring", "args", "field", "heading", "test-name", "test-import")

BANNED_WORDS = (
    "tell|tells|telling|told",
    "judge|judges|judged|judging|judgement|judgment",
    "room|rooms",
    "floor|floors",
    "home|homes",
    r"stand|standing|stood|stands(?! for\b)",
    "speak|speaks|speaking|spoken|speaker|speakers",
    "hear|hears|heard|hearing",
    "farewell|farewells|anew|mend|mends|mended|whosever",
    "to the bit",
    "go on|goes on|going on|gone on|went on",
    "lack|lacks|lacked|lacking",
    "beside",
    "(?:is|are|was|were|be) none of|none of them",
    "nobody|somebody",
    "ask for|asks for|asked for|asking for|ask of|asked of",
    "deal|deals|dealing|dealt",
    "the way back",
    "lie|lies|lain|lying",
    r"what (?:it|they|he|this rank|a rank|each rank|the rank|others?) (?:holds?|has|have|had)",
    r"(?<!its )(?<!their )(?<!your )(?<!our )(?<!his )(?<!my )(?<!'s )(?<!s' )(?<!whose )own",
)
WORDS = re.compile(rf"(?<![\w$])(?:{'|'.join(BANNED_WORDS)})(?!\w)", re.IGNORECASE)
NAME_WORDS = frozenset(
    """
    tell tells telling told judge judges judged judging room rooms floor floors home stand stands standing stood
    speak speaks speaker hear hears heard farewell anew mend mends mended lack lacks lacking beside whosever nobody
    somebody dealt deal deals lie lies lying own
    """.split()  # noqa: SIM905
)
WHOLE_NAMES = frozenset({"one", "found"})

EXCEPTIONS: tuple[tuple[str, str], ...] = (
    # (a pattern around the word, why it is right there)
    (r"llm[- ]?(?:as[- ]a[- ])?judges?|llm_judge\w*", "LLM as a judge is the field's term"),
    (r"judge(?:'s)? (?:model|prompt|template|rubric|score|reply|engine|url)s?|judges? model", "parts of an LLM judge"),
    (r"reward\.judge\b[.\w]*", "the configuration section of an LLM judge"),
    (r"(?:math|torch|np|numpy|jnp)\.floor|floor\(|floor[_ -]div\w*|floor of the quotient", "rounding down"),
    (
        r"\$home|(?-i:\bHOME\b)|path\.home|home (?:directory|folder)|/home/|\"home\"|'home'",
        "the user's directory, the key",
    ),
    (r"stand-?alone", "an adjective of its own meaning"),
    (r"rounding_mode", "an argument of torch.div"),
)
EXCEPTION = re.compile("|".join(pattern for pattern, _ in EXCEPTIONS), re.IGNORECASE)
# Inside a module about the LLM judge the word needs no "LLM" before it.
JUDGE_FILES = re.compile(r"llm_judge")
# Maps from names of former versions to those of today: a configuration that uses one gets the new name in the error.
FORMER_NAMES = re.compile(r"^_?(?:OLD|FORMER|RENAMED|LEGACY)_?[A-Z_]*$")
THIS_FILE = Path(__file__).resolve()

MIN_SUMMARY = 25
FRAGMENTS = re.compile(
    r"(?:Of|See|What|Whatever|Who|Whose|Whoever|Which|That|Those|Where|How)\b"
    r"|(?:To be|The way|Whether this|As|Nor|Or|And|But)\b"
)
LOWERCASE_NAMES = re.compile(
    r"(?:torch|megatron|numpy|pip|vllm|verl|safetensors|k8s|kubectl|mpirun|torchrun|pydantic)\b"
)
PRIVATE_CALLS = {"field_validator", "model_validator", "field_serializer", "model_serializer", "overload", "override"}
EXTERNAL_OVERRIDES = {
    *("forward", "backward", "setup_context", "step", "state_dict", "load_state_dict", "sharded_state_dict"),
    *("emit", "log_message", "do_GET", "do_POST", "model_post_init", "set_input_tensor", "handle_starttag"),
}
RECIPE_PARAMETERS = {"job", "cfg", "config", "inputs", "tokens", "batch", "metrics"}
TEST_NAME_STARTS = frozenset(
    """
    nor or it its and but that what whatever whoever who whose whom which then so also neither yet where when while
    if this these those they there else otherwise still as even not nobody somebody he she his her either both than to
    of
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Violation:
    """A place in a file that breaks a rule."""

    file: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.text}"


@dataclass(frozen=True)
class ClassInfo:
    """Bases and methods of a class, for the question whether a method overrides a documented one."""

    bases: tuple[str, ...]
    methods: Mapping[str, tuple[tuple[str, ...], bool]]

    @property
    def is_interface(self) -> bool:
        return any(base in ("Protocol", "ABC") for base in self.bases)


Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


def check(paths: list[Path]) -> list[Violation]:
    """Violations in files and in all files below folders."""
    return [violation for path in paths for file in _files(path) for violation in check_file(file)]


def check_file(file: Path) -> Iterator[Violation]:
    text = file.read_text(encoding="utf-8")
    try:
        place = file.resolve().relative_to(REPOSITORY)
    except ValueError:
        place = file
    if file.suffix == ".py":
        yield from check_python(place, text, _project_classes())
    else:
        yield from check_text(place, text)


def _files(path: Path) -> list[Path]:
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [
        file for file in files if (file.suffix == ".py" or file.suffix in TEXT_SUFFIXES) and file.resolve() != THIS_FILE
    ]


def check_text(file: Path, text: str) -> Iterator[Violation]:
    for number, line in enumerate(text.splitlines(), 1):
        for word in banned(line, file):
            yield Violation(file, number, "word", f'"{word}" in: {line.strip()[:120]}')
        if file.suffix == ".md" and re.match(r"#+ (What|Where|Who|Whose|That|Those|Whether)\b", line):
            yield Violation(file, number, "heading", line)


def check_python(file: Path, text: str, classes: Mapping[str, list[ClassInfo]]) -> Iterator[Violation]:
    tree = ast.parse(text)
    if file.parts[:1] == ("tests",):
        yield from _check_tests(file, tree)
        return
    yield from _check_words(file, text, tree)
    yield from _check_docstrings(file, tree)
    if file.parts[:1] != ("tools",):  # scripts: nothing imports their functions
        yield from _check_args(file, tree, classes)
    yield from _check_fields(file, tree, classes)


def banned(text: str, file: Path) -> list[str]:
    """Banned words of a text, less those that an exception covers."""
    return [match.group() for match in _banned_matches(text, file)]


def _banned_matches(text: str, file: Path) -> list[re.Match[str]]:
    matches = [match for match in WORDS.finditer(text) if not _is_judge(match.group(), file)]
    covered = [match.span() for match in EXCEPTION.finditer(text)] if matches else []
    return [match for match in matches if not any(a <= match.start() and match.end() <= b for a, b in covered)]


def _is_judge(word: str, file: Path) -> bool:
    return word.lower().startswith("judge") and bool(JUDGE_FILES.search(str(file)))


def banned_name(name: str, file: Path) -> bool:
    words = [word.lower() for word in re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", name)]
    if "llm" in words or JUDGE_FILES.search(str(file)):
        words = [word for word in words if not word.startswith("judge")]
    if "floor" in words and "div" in " ".join(words):
        words.remove("floor")
    return name.strip("_") in WHOLE_NAMES or not NAME_WORDS.isdisjoint(words)


def _check_words(file: Path, text: str, tree: ast.Module) -> Iterator[Violation]:
    if banned_name(file.stem, file):
        yield Violation(file, 1, "word", f"the module's name {file.stem}")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            for word in banned(token.string, file):
                yield Violation(file, token.start[0], "word", f'"{word}" in: {token.string[:120]}')
    former = {id(part) for node in ast.walk(tree) if _names_former(node) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in former:
            yield from _check_string(file, node)
        for name, line in _defined(node):
            if banned_name(name, file):
                yield Violation(file, line, "word", f"the name {name}")


def _check_string(file: Path, node: ast.Constant) -> Iterator[Violation]:
    # A phrase may run over the end of a line, whose indentation is not part of it.
    folded = re.sub(r"\n *", "\n", node.value)
    for match in _banned_matches(folded.replace("\n", " "), file):
        line = node.lineno + folded[: match.start()].count("\n")
        excerpt = folded[max(0, match.start() - 50) : match.end() + 50].replace("\n", " ").strip()
        yield Violation(file, line, "word", f'"{match.group()}" in: {excerpt}')


def _names_former(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and FORMER_NAMES.match(target.id) for target in targets)


def _defined(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a node defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name, node.lineno
    elif isinstance(node, ast.arg):
        yield node.arg, node.lineno
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node.lineno
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr, node.lineno
    elif isinstance(node, ast.alias) and node.asname:
        yield node.asname, node.lineno


def _check_docstrings(file: Path, tree: ast.Module) -> Iterator[Violation]:
    for node in ast.walk(tree):
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
    line = 1 if isinstance(node, ast.Module) else node.lineno
    name = "" if isinstance(node, ast.Module) else node.name
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
    for field in _fields(node):
        if re.search(rf"(?:^|[\s`]){field}`?: ", body):
            yield Violation(
                file, node.lineno, "docstring", f"{node.name} describes {field} in its text; put it below the field"
            )


def _fields(node: ast.ClassDef) -> list[str]:
    return [
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    ]


def _attribute_docstrings(node: ast.AST) -> Iterator[ast.Expr]:
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    for before, part in itertools.pairwise(body):
        if isinstance(before, ast.Assign | ast.AnnAssign) and _is_text(part):
            yield part


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _check_args(file: Path, tree: ast.Module, classes: Mapping[str, list[ClassInfo]]) -> Iterator[Violation]:
    for owner, function in _public_functions(tree):
        names = _parameters(function, owner)
        if len(names) < 2 or _is_exempt(file, owner, function, names, classes):
            continue
        described = _described_args(ast.get_docstring(function) or "")
        missing = [name for name in names if name not in described]
        if missing:
            yield Violation(file, function.lineno, "args", f"{function.name} does not describe {', '.join(missing)}")


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
    file: Path,
    owner: ast.ClassDef | None,
    function: Function,
    names: list[str],
    classes: Mapping[str, list[ClassInfo]],
) -> bool:
    if PRIVATE_CALLS & _decorators(function):
        return True
    if (
        file.parts[:1] == ("recipes",)
        and len(file.parts) == 2
        and owner is None
        and len(set(names) - RECIPE_PARAMETERS) <= 1
    ):
        return True
    if owner is None:
        return False
    if function.name in EXTERNAL_OVERRIDES:
        return True
    bases = _all_bases(owner, classes)
    interfaces = [info for infos in classes.values() for info in infos if info.is_interface]
    for info in [*bases, *(() if owner.name in classes and _is_interface(owner) else interfaces)]:
        parameters, documented = info.methods.get(function.name, ((), False))
        if documented and set(names) <= set(parameters):
            return True
    return False


def _is_interface(node: ast.ClassDef) -> bool:
    return any(base in ("Protocol", "ABC") for base in _base_names(node))


def _all_bases(node: ast.ClassDef, classes: Mapping[str, list[ClassInfo]]) -> list[ClassInfo]:
    todo, done, result = list(_base_names(node)), {node.name}, []
    while todo:
        name = todo.pop()
        if name not in done:
            done.add(name)
            result += classes.get(name, [])
            todo += [base for info in classes.get(name, []) for base in info.bases]
    return result


def _base_names(node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        part = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(part, ast.Name | ast.Attribute):
            yield part.id if isinstance(part, ast.Name) else part.attr


def _described_args(docstring: str) -> set[str]:
    lines = iter(docstring.splitlines())
    for line in lines:
        if line.strip() == "Args:":
            break
    names: set[str] = set()
    for line in lines:
        if line.strip() and not line.startswith(" "):
            break
        entry = re.match(r" +([*`\w, /]+?)(?: \([^)]*\))?:(?:\s|$)", line)
        if entry:
            names |= set(re.findall(r"\w+", entry.group(1)))
    return names


def _check_fields(file: Path, tree: ast.Module, classes: Mapping[str, list[ClassInfo]]) -> Iterator[Violation]:
    for node in ast.walk(tree):
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


def _check_tests(file: Path, tree: ast.Module) -> Iterator[Violation]:
    for node in ast.walk(tree):
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


def class_index(sources: list[str]) -> dict[str, list[ClassInfo]]:
    """All classes of some modules by name."""
    classes: dict[str, list[ClassInfo]] = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                methods = {
                    part.name: (tuple(_parameters(part, node)), bool(ast.get_docstring(part)))
                    for part in node.body
                    if isinstance(part, Function)
                }
                classes.setdefault(node.name, []).append(ClassInfo(tuple(_base_names(node)), methods))
    return classes


@functools.cache
def _project_classes() -> dict[str, list[ClassInfo]]:
    files = [file for folder in ("verl_mg", "recipes") for file in sorted((REPOSITORY / folder).rglob("*.py"))]
    return class_index([file.read_text(encoding="utf-8") for file in files])


@functools.cache
def _all_violations() -> list[Violation]:
    return check([REPOSITORY / path for path in CHECKED])


@pytest.mark.parametrize("rule", RULES)
def test_language_of_the_repository_follows_rule(rule: str) -> None:
    violations = [str(violation) for violation in _all_violations() if violation.rule == rule]
    assert not violations, f"{len(violations)} violations:\n" + "\n".join(violations)


def rules_of(text: str, file: str = "verl_mg/roles/role.py") -> list[str]:
    """Rules that a text breaks, as a file of the repository."""
    if file.endswith(".py"):
        return [violation.rule for violation in check_python(Path(file), text, class_index([text]))]
    return [violation.rule for violation in check_text(Path(file), text)]


SOUND = '''"""Distributed work queue for rollout requests."""


class WorkQueue(Protocol):
    """Source of the requests that a rank's engine works on."""

    def claim(self, rank: int, count: int) -> list[int]:
        """Claims samples for a rank.

        Args:
            rank: global rank of the engine's leader.
            count: number of samples.
        """


class StaticQueue(WorkQueue):
    """Requests assigned to ranks before generation starts."""

    def claim(self, rank: int, count: int) -> list[int]:
        """Claims the next samples of this rank's share."""
        return math.floor(count / 2)  # the LLM judge has its own queue


class QueueConfig(ConfigSection):
    """Configuration of the queue."""

    size: int = 8
    """Number of samples."""
'''


def test_checker_given_sound_module_passes() -> None:
    assert rules_of(SOUND) == []


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ("global rank", "rank that was told", "word"),
        ("global rank", "home", "word"),
        ("# the LLM judge has its own queue", "# the judge", "word"),
        ("# the LLM judge has its own queue", "# own queue", "word"),
        ("next samples of this", "samples that none\n        of them took, of this", "word"),
        ("math.floor(count / 2)", "floors", ""),
        ("math.floor(count / 2)", "UserError(f'{count} are asked for')", "word"),
        ("math.floor(count / 2)", "[one for one in range(2)]", "word"),
        ("math.floor(count / 2)", "[found := 2]", "word"),
        ("StaticQueue", "FixedDeal", "word"),
        ("Distributed work queue for rollout requests.", "Deals.", "word docstring"),
        ("Requests assigned to ranks before generation starts.", "Of this rank's engine and its queue.", "docstring"),
        ("Requests assigned to ranks before generation starts.", "What happens to the model, and when.", "docstring"),
        ("Requests assigned to ranks before generation starts.", "See `WorkQueue`, the base of this.", "docstring"),
        ("Requests assigned to ranks before generation starts.", "Nats.", "docstring"),
        ("Requests assigned to ranks before generation starts.", "requests assigned before the start.", "docstring"),
        ("Configuration of the queue.", "Configuration of the queue. size: number of samples.", "docstring"),
        ("Number of samples.", "What a rank claims.", "docstring"),
        ('    """Number of samples."""\n', "", "field"),
        ("            count: number of samples.\n", "", "args"),
        ("Args:", "Arguments:", "args"),
        ("class StaticQueue(WorkQueue)", "class StaticQueue", ""),
        ("class WorkQueue(Protocol)", "class WorkQueue", ""),
    ],
)
def test_checker_given_changed_module_reports_rule(before: str, after: str, rule: str) -> None:
    assert before in SOUND
    assert set(rules_of(SOUND.replace(before, after, 1))) == set(rule.split())


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("def test_layout_without_experts_parses(): pass", ""),
        ("def test_nor_what_a_value_head_learns(): pass", "test-name"),
        ("def test_layout(): pass", "test-name"),
        ("def test_status_of_silence_is_told(): pass", "word"),
        ("from tests.roles.test_rollout import inputs", "test-import"),
        ("from tests.roles import test_rollout", "test-import"),
        ("from tests.conftest import ranks", "test-import"),
        ("from tests.tiny_models import ranks", ""),
    ],
)
def test_checker_given_test_module_reports_rule(source: str, rule: str) -> None:
    assert rules_of(source, "tests/roles/test_role.py") == rule.split()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("# Weight resharding\nRewards go to an LLM judge; see `$HOME`.", ""),
        ("## What a sample is worth", "heading"),
        ("Ranks that stand in for others.", "word"),
        ("The job goes on from there.", "word"),
    ],
)
def test_checker_given_markdown_reports_rule(text: str, rule: str) -> None:
    assert rules_of(text, "docs/guide.md") == rule.split()


def test_checker_given_former_names_accepts_them() -> None:
    assert rules_of('"""Former names of configuration keys."""\nOLD_KEYS = {"floor": "layer"}\n') == []


def main(arguments: list[str]) -> int:
    violations = check([Path(path) for path in arguments or [str(REPOSITORY / path) for path in CHECKED]])
    for violation in violations:
        print(violation)
    counts = {rule: sum(violation.rule == rule for violation in violations) for rule in RULES}
    print(f"{len(violations)} violations: " + ", ".join(f"{rule} {count}" for rule, count in counts.items() if count))
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
