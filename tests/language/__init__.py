"""Checks the language of code, documentation and test names against CONTRIBUTING.md.

Run it on some paths with `python -m tests.language PATH...`: one line for each violation, `file:line: rule: text`.

Rules:
    word: a word of no technical meaning here ("room", "told"), in a name, docstring, comment, message or document.
    docstring: a first line that is a fragment, a relative clause or too short; a list of fields inside the text.
    args: a public function of an interface with two or more parameters whose docstring has no `Args:` that names each;
        sections `Args`, `Returns` and `Raises` elsewhere.
    field: a configuration field without a docstring below it.
    heading: a Markdown heading that is a relative clause.
    test-name: a test that is not named test_<unit>_<condition>_<expectation>.
    test-import: a module of the tests that imports from another test module or from a conftest.
    private: a test that reaches through private attributes of two objects in one expression.
"""

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.language.structure import (
    ClassInfo,
    check_args,
    check_docstrings,
    check_fields,
    check_tests,
    class_index,
    statements,
)
from tests.language.words import Violation, banned, check_words

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKED = ("verl_mg", "recipes", "tools", "launch", "docs", "tests", "README.md", "CONTRIBUTING.md", "AGENTS.md")
TEXT_SUFFIXES = {".md", ".yaml", ".sh", ".sbatch", ".toml", ".ini", ".js", ".html", ".css"}
RULES = ("word", "docstring", "args", "field", "heading", "test-name", "test-import", "private")


def check(paths: list[Path]) -> list[Violation]:
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
    return [file for file in files if file.suffix == ".py" or file.suffix in TEXT_SUFFIXES]


def check_text(file: Path, text: str) -> Iterator[Violation]:
    for number, line in enumerate(text.splitlines(), 1):
        for word in banned(line, file):
            yield Violation(file, number, "word", f'"{word}" in: {line.strip()[:120]}')
        if file.suffix == ".md" and re.match(r"#+ (What|Where|Who|Whose|That|Those|Whether)\b", line):
            yield Violation(file, number, "heading", line)


def check_python(file: Path, text: str, classes: Mapping[str, list[ClassInfo]]) -> Iterator[Violation]:
    tree = ast.parse(text)
    if file.parts[:1] == ("tests",):
        yield from check_tests(file, text, list(statements(tree)))
        return
    nodes = list(ast.walk(tree))
    yield from check_words(file, text, nodes)
    yield from check_docstrings(file, nodes)
    if file.parts[:1] != ("tools",):  # scripts: nothing imports their functions
        yield from check_args(file, tree, classes)
    yield from check_fields(file, nodes, classes)


@functools.cache
def _project_classes() -> dict[str, list[ClassInfo]]:
    files = [file for folder in ("verl_mg", "recipes") for file in sorted((REPOSITORY / folder).rglob("*.py"))]
    return class_index([file.read_text(encoding="utf-8") for file in files])
