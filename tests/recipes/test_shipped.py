"""What is shipped: recipes are short, listed, configured, and built on each other in one direction."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.recipes.tiny_runs import LETTERS, tiny_run
from tests.tiny_jobs import RECIPES
from verl_mg.config import load_config
from verl_mg.job.recipe import load_recipe, requested_roles

FILES = sorted(RECIPES.glob("*.py"))
README = (RECIPES / "README.md").read_text(encoding="utf-8")
JUDGED = {"distillation", "dpo", "prime"}
"""Recipes that need the reference whatever the KL penalty weighs."""


@pytest.mark.parametrize("file", [*FILES, *sorted((RECIPES / "pieces").glob("*.py"))], ids=lambda file: file.stem)
def test_a_recipe_fits_on_a_page(file):
    assert len(file.read_text().splitlines()) <= 100


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_listed_and_configured(file):
    assert README.count(f"[{file.name}]({file.name})") == 1
    assert len(re.findall(rf"^\| {file.stem} \|.*→", README, flags=re.MULTILINE)) >= 1
    recipe = load_recipe(file)
    config = load_config(LETTERS / f"{file.stem}.yaml", [], recipe.config)
    assert config.job.output == Path("runs/repeat_digit") / file.stem
    requested_roles(recipe, config)


def test_recipes_import_each_other_in_one_direction():
    known = {".".join(file.relative_to(RECIPES.parent).with_suffix("").parts): file for file in RECIPES.rglob("*.py")}
    graph = {name: imported(file) & known.keys() for name, file in known.items()}
    assert graph["recipes.dr_grpo"] == {"recipes.grpo"}
    order = list(TopologicalSorter(graph).static_order())
    assert len(order) == len(known)
    # Pieces are what recipes are made of, tasks what they are shown on: neither knows a recipe.
    recipes = {f"recipes.{file.stem}" for file in FILES}
    assert not any(graph[name] & recipes for name in known.keys() - recipes)


def imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_reference_is_there_where_something_asks_for_it(file):
    recipe = load_recipe(file)
    cfg = recipe.config()
    assert ("reference" in recipe.roles(cfg)) == (file.stem in JUDGED)
    if "kl_coefficient" in recipe.config.model_fields:
        assert "reference" in recipe.roles(cfg.model_copy(update={"kl_coefficient": 0.1}))


def test_the_recipe_that_the_readme_composes_runs(ranks, tasks, tmp_path):
    (source,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(source.splitlines()) <= 30
    (tmp_path / "mine.py").write_text(source)
    overrides = ["job.iterations=2", "job.save=false", "algorithm.prompts_per_iteration=8"]
    lines = tiny_run(ranks, "remax", tasks(0), tmp_path / "run", overrides, recipe=tmp_path / "mine.py")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["actor/grad_norm"] > 0 for line in lines)
