"""Each key of the configuration has a test that fails when the key is ignored.

    a run with another value is another run, or is refused    key_changes.py
    the test that keys_and_tests.json names for it fails      tests/helpers/ignored_key.py

A new key needs a row of one of them. `python -m pytest -m nightly tests/recipes/test_keys.py -k NAME` tries it.
"""

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ignored_key import owned_keys
from tests.recipes.key_changes import (
    CHANGES,
    NAMES,
    RECIPE_OF,
    SECTIONS,
    changed,
    outcome,
    overrides_of,
    recipe_keys,
)
from tests.recipes.tiny_runs import tiny_run

ROOT = Path(__file__).parents[2]
TESTS: dict[str, Any] = json.loads((Path(__file__).parent / "keys_and_tests.json").read_text(encoding="utf-8"))
OF_RECIPES = {f"{name}.{key}": (name, key) for name in NAMES for key in recipe_keys(name)}


def is_test(node: str) -> bool:
    """Whether a file of the tree defines the test."""
    file, _, name = node.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return name.partition("[")[0] in {part.name for part in tree.body if isinstance(part, ast.FunctionDef)}


def test_keys_and_tests_have_each_key_of_the_configuration():
    sections = {key for key in owned_keys() if not key.startswith("Config.")}  # those of Config are the sections
    named = [*SECTIONS, *TESTS["tests"], *TESTS["every run"]]
    assert sorted(name for name in named if name not in OF_RECIPES) == sorted(sections)
    assert {key for _, key in OF_RECIPES.values()} == CHANGES.keys()
    assert [node for node in TESTS["tests"].values() if not is_test(node)] == []


@pytest.fixture(scope="module")
def run(ranks, tasks):
    """The outcome of a short run of a recipe with other overrides, or the error that refuses them."""

    @cache
    def outcome_of(name: str, others: tuple[str, ...], again: int = 0) -> Any:
        folder = tasks(0) / "keys" / f"{name}-{abs(hash((others, again)))}"
        folder.parent.mkdir(exist_ok=True)
        overrides = overrides_of(name, tasks(1) / "model", others)
        try:
            tiny_run(ranks, name, tasks(0), folder, overrides, count=1)
        except AssertionError as error:
            return str(error).splitlines()[-1]
        return outcome(folder)

    return outcome_of


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_recipe_run_twice_is_the_same_run(run, name):
    # So that a difference comes from the key, and a key that reads as its default gives the run without it.
    assert run(name, ()) == run(name, (), 1)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "key"), [OF_RECIPES[key] for key in OF_RECIPES if key not in TESTS["tests"]])
def test_recipe_key_changes_the_run_or_is_refused(run, name, key):
    *others, _ = overrides = changed(name, key)
    usual, other = run(name, tuple(others)), run(name, tuple(overrides))
    check_change(usual, other, f"algorithm.{key.partition('.')[0]}")


@pytest.mark.nightly
@pytest.mark.parametrize("key", SECTIONS)
def test_key_changes_the_run_or_is_refused(run, tasks, key):
    places = {"TASK": str(tasks(0)), "OTHER": str(tasks(1))}
    *others, own = (re.sub("TASK|OTHER", lambda name: places[name[0]], text) for text in SECTIONS[key])
    name = RECIPE_OF.get(key, "grpo")
    check_change(run(name, tuple(others)), run(name, (*others, own)), key.partition(".")[2])


def check_change(usual: Any, other: Any, key: str) -> None:
    """Two outcomes differ; an error has to be one that names the key."""
    assert not isinstance(usual, str), usual
    assert usual != other
    assert not isinstance(other, str) or ("UserError" in other and key in other), other


@pytest.mark.nightly
@pytest.mark.parametrize(("key", "node"), TESTS["tests"].items())
def test_key_that_reads_as_its_default_fails_its_test(key, node):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "nightly or not nightly"]
    plugin = ["-p", "tests.helpers.ignored_key", "--ignored-key", key]
    ignored = subprocess.run([*command, *plugin, node], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ignored.returncode == pytest.ExitCode.TESTS_FAILED, ignored.stdout[-2000:]
    assert subprocess.run([*command, node], cwd=ROOT, capture_output=True, check=False).returncode == pytest.ExitCode.OK
