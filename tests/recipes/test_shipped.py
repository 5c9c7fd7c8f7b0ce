"""Shipped recipes are listed, configured and documented, and helpers do not depend on recipes."""

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.tiny_jobs import RECIPES
from tests.recipes.tiny_runs import LETTERS, tiny_run
from verl_mg.config import load_config
from verl_mg.job.recipe import load_recipe, requested_roles

FILES = sorted(RECIPES.glob("[!_]*.py"))
README = (RECIPES / "README.md").read_text(encoding="utf-8")
WITH_REFERENCE = {"dpo", "prime"}
"""Recipes that need the reference without a KL penalty."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_recipe_in_readme_and_configs_is_listed_and_valid(file):
    assert README.count(f"[{file.name}]({file.name})") == 1
    assert len(re.findall(rf"^\| {file.stem} \|.*→", README, flags=re.MULTILINE)) >= 1
    recipe = load_recipe(file)
    config = load_config(LETTERS / f"{file.stem}.yaml", [], recipe.config)
    assert config.job.output == Path("runs/repeat_digit") / file.stem
    requested_roles(recipe, config)


@pytest.mark.parametrize(
    "file", [*RECIPES.glob("common/*.py"), *RECIPES.glob("tasks/*.py")], ids=lambda file: file.stem
)
def test_helpers_and_tasks_import_no_recipe(file):
    recipes = {f"verl_mg.recipes.{recipe.stem}" for recipe in FILES}
    assert not imported(file) & recipes


def imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_roles_with_a_kl_penalty_contain_the_reference(file):
    recipe = load_recipe(file)
    assert ("reference" in recipe.roles(recipe.config())) == (file.stem in WITH_REFERENCE)
    if "kl" in recipe.config.model_fields:
        assert "reference" in recipe.roles(recipe.config.model_validate({"kl": {"coefficient": 0.1}}))


def test_recipe_of_the_readme_runs(ranks, tasks, tmp_path):
    (source,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(source.splitlines()) <= 40
    (tmp_path / "mine.py").write_text(source)
    overrides = ["job.iterations=2", "job.save=false", "algorithm.prompts_per_iteration=8"]
    lines = tiny_run(ranks, "grpo", tasks(0), tmp_path / "run", overrides, recipe=tmp_path / "mine.py")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["actor/grad_norm"] > 0 for line in lines)
