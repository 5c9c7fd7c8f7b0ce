"""Language of code, documents and test names, and the checker of `tests.language` on texts that break each rule."""

import ast
import collections.abc
import contextlib
import functools
import re
import typing
from pathlib import Path

import pytest

from tests.language import CHECKED, REPOSITORY, RULES, check, check_python, check_text
from tests.language.structure import class_index
from tests.language.words import Violation


@functools.cache
def _all_violations() -> list[Violation]:
    return check([REPOSITORY / path for path in CHECKED])


@pytest.mark.parametrize("rule", RULES)
def test_language_of_the_repository_follows_rule(rule):
    violations = [str(violation) for violation in _all_violations() if violation.rule == rule]
    assert not violations, f"{len(violations)} violations:\n" + "\n".join(violations)


def rules_of(text: str, file: str = "verl_mg/batch.py") -> list[str]:
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


def test_checker_given_sound_module_passes():
    assert rules_of(SOUND) == []


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ("global rank", "rank that was told", "word"),
        ("global rank", "home", "word"),
        ("global rank", "rank alone", "word"),
        ("global rank", "rank behind the others", "word"),
        ("global rank", "rank behind a proxy", ""),
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
        ("Requests assigned to ranks before generation starts.", "Takes the requests of the ranks.", "docstring"),
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
def test_checker_given_changed_module_reports_rule(before, after, rule):
    assert before in SOUND
    assert set(rules_of(SOUND.replace(before, after, 1))) == set(rule.split())


@pytest.mark.parametrize("section", ["Args", "Returns", "Raises"])
def test_checker_given_sections_outside_the_interfaces_reports_rule(section):
    text = f'''def claim(rank: int, count: int) -> list[int]:
    """Claims samples for a rank.

    {section}:
        text
    """
'''
    assert rules_of(text, "verl_mg/roles/role.py") == ["args"]
    assert rules_of(text.replace(f"{section}:", "Shapes of"), "verl_mg/roles/role.py") == []
    assert rules_of(SOUND, "verl_mg/roles/role.py") == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("def test_layout_without_experts_parses(): pass", ""),
        ("def test_nor_what_a_value_head_learns(): pass", "test-name"),
        ("def test_layout(): pass", "test-name"),
        ("def test_status_of_silence_is_told(): pass", "word"),
        ("from tests.rollout.test_rollout import inputs", "test-import"),
        ("from tests.roles import test_rollout", "test-import"),
        ("from tests.conftest import ranks", "test-import"),
        ("from tests.helpers.tiny_models import ranks", ""),
        ("assert job.rollout._engines" + "._sync", "private"),
        ("assert job.rollout._engines.engine.restart()._sync == 1", ""),
        ("import torch\nassert torch._C._get_allocator()", ""),
        ("# Weight resharding\nRewards go to an LLM judge; see `$HOME`.", ""),
        ("## What a sample is worth", "heading"),
        ("Ranks that stand in for others.", "word"),
        ("The job goes on from there.", "word"),
    ],
)
def test_checker_given_test_module_or_page_reports_rule(text, rule):
    page = text.startswith(("#", "Ranks", "The"))
    assert rules_of(text, "docs/guide.md" if page else "tests/roles/test_role.py") == rule.split()


def test_names_of_typing_are_given_to_nothing_else():
    elsewhere = {name for module in (collections.abc, contextlib, re) for name in dir(module)}  # typing repeats them
    reserved, found = {name for name in typing.__all__ if name[0].isupper()} - elsewhere, []
    for file in (file for folder in ("verl_mg", "recipes", "tools") for file in (REPOSITORY / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else [node] if isinstance(node, ast.ClassDef) else []
            names = {getattr(target, "id", None) or getattr(target, "name", "") for target in targets}
            found += [f"{file}:{node.lineno}: {name}" for name in names & reserved]
    assert not found, found
