"""Each recipe is one page with the whole data flow, is listed, configured and documented, and imports no other one."""

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.tiny_jobs import RECIPES
from tests.recipes.tiny_runs import LETTERS, tiny_run
from verl_mg.config import RecipeConfig, load_config
from verl_mg.job.recipe import load_recipe, requested_roles

FILES = sorted(RECIPES.glob("[!_]*.py"))
COMMON = sorted((RECIPES / "common").glob("*.py"))
WITHOUT_SAMPLING = {"sft", "dpo", "reward_model"}
WITHOUT_LOGPROBS = {"reinforce"}
"""Recipes whose update needs neither old log-probs nor a reference."""
BY_DIVERGENCE = {"gkd"}
"""Recipes without old log-probs: their loss has no ratio."""
MAX_LINES = 150


def functions(file: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def job_calls(function: ast.FunctionDef) -> list[str]:
    """Calls such as job.actor.update, without `job.`, in the order of their lines."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    names = [ast.unparse(call.func) for call in calls]
    return [name.removeprefix("job.") for name in names if name.startswith("job.")]


def in_order(expected: list[str], calls: list[str]) -> bool:
    remaining = iter(calls)
    return all(name in remaining for name in expected)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_iteration_of_a_recipe_contains_the_data_flow_in_order(file):
    calls = job_calls(functions(file)["iteration"])
    if file.stem in WITHOUT_SAMPLING:
        updates = [name for name in calls if name.endswith(".update")]
        assert calls[0] == "prompts.next_batch" and calls[-1] == updates[0] and len(updates) == 1
    elif file.stem in WITHOUT_LOGPROBS:
        assert calls[:3] == ["prompts.next_batch", "rollout.generate", "reward.wait"]
        assert calls[-2:] == ["actor.update", "rollout.update_weights"] and len(file.read_text().splitlines()) <= 44
    else:
        flow = ["prompts.next_batch", "rollout.generate", "reward.wait", "concurrent_roles"]
        flow += ["teachers.score" if file.stem in BY_DIVERGENCE else "actor.compute_logprobs"]
        assert in_order([*flow, "actor.update", "rollout.update_weights"], calls), calls


OF_PAIRS_OR_SEQUENCES = {"dpo": 1, "reward_model": 1, "prime": 1}
"""Updates whose loss is of pairs or whole sequences, by recipe: it has one aggregation only."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_updates_of_a_recipe_have_the_aggregation_of_its_key(file):
    calls = [node for node in ast.walk(functions(file)["iteration"]) if isinstance(node, ast.Call)]
    updates = [call for call in calls if ast.unparse(call.func).endswith(".update")]
    of_key = [ast.unparse(call) for call in updates if ast.unparse(call.args[2]) == "cfg.loss_aggregation"]
    assert len(updates) - len(of_key) == OF_PAIRS_OR_SEQUENCES.get(file.stem, 0)
    fields = load_recipe(file).config.model_fields
    assert ("loss_aggregation" in fields) == bool(of_key)
    # The sum that is divided by the longest response is no choice where there are no responses.
    if "seq-mean-token-sum-norm" in str(fields.get("loss_aggregation")):
        assert all("max_length=" in call or "**steps" in call for call in of_key)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_functions_of_a_recipe_other_than_iteration_take_no_job(file):
    for name, function in functions(file).items():
        parameters = [argument.arg for argument in function.args.args]
        assert ("job" in parameters) == (name == "iteration"), name


@pytest.mark.parametrize("file", COMMON, ids=lambda file: file.stem)
def test_helpers_of_recipes_do_not_use_the_job(file):
    tree = ast.parse(file.read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "job" not in names and "Job" not in names
    assert not any(module and module.startswith(("verl_mg.job", "verl_mg.roles")) for module in modules)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_of_a_recipe_is_flat(file):
    assert load_recipe(file).config.__bases__ == (RecipeConfig,)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_page_of_a_recipe_is_short_and_begins_with_paper_and_data_flow(file):
    text = file.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring and "arXiv:" in docstring.splitlines()[0]
    assert " -> " in docstring.splitlines()[2]
    assert "Differences from GRPO" in docstring or file.stem == "grpo"


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


@pytest.mark.parametrize("file", [*FILES, *COMMON, *RECIPES.glob("tasks/*.py")], ids=lambda file: file.stem)
def test_recipe_helper_or_task_imports_no_recipe(file):
    assert not imported(file) & {"recipes", "verl_mg.recipes", *(f"verl_mg.recipes.{other.stem}" for other in FILES)}


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
