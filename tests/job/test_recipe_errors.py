"""Exceptions of role calls point at the line of the recipe that made the call; printing a column never blocks."""

import traceback
from pathlib import Path

import pytest

from tests.helpers.rank_pool import job_store
from tests.helpers.tiny_jobs import files_of, write_sums
from tests.helpers.tiny_models import tiny_model
from verl_mg.config import load_config
from verl_mg.errors import UserError
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import load_recipe, requested_roles
from verl_mg.run.loop import one_iteration

HEAD = """
import torch.distributed as dist
from verl_mg.config import RecipeConfig

class Config(RecipeConfig):
    ...

def roles(cfg):
    return {"actor", "reference"}

def broken_loss(inputs):
    return inputs.logprobs / (1 // 0), {}

def loss(inputs):
    return -inputs.logprobs, {}

def iteration(job, cfg):
    batch = job.sft_batch([job.prompts.by_id(i) for i in range(6)])
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_model(folder / "model", "qwen3", layers=2)
    write_sums(folder)
    return folder


def run_iteration(
    recipe_file: Path, inputs: Path, overrides: tuple[str, ...] = ("reference.ranks=0",)
) -> tuple[str, list[str], list[str]]:
    """The error of one iteration: its text, the lines of the recipe in its traceback, its notes."""
    recipe = load_recipe(recipe_file)
    options = [*files_of(inputs, recipe_file.parent), "actor.ranks=0", *overrides]
    config = load_config(None, options, recipe.config)
    job = RunningJob(config, requested_roles(recipe, config), job_store(), recipe=recipe.name)
    try:
        one_iteration(recipe, job, 1)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.line or "" for frame in frames if frame.filename == str(recipe_file)]
        return f"{type(error).__name__}: {error}", lines, getattr(error, "__notes__", [])
    return "", [], []


def written(tmp_path: Path, *lines: str, head: str = HEAD) -> Path:
    recipe = tmp_path / "broken.py"
    recipe.write_text(head + "".join(f"    {line}\n" for line in lines))
    return recipe


def test_exception_in_a_loss_points_at_the_update_of_the_recipe(ranks, inputs, tmp_path):
    update = 'job.actor.update(batch, broken_loss, "token-mean")  # expected'
    recipe = written(tmp_path, "job.reference.compute_logprobs(batch)", update, "return {}")
    ((error, lines, _),) = ranks.run(1, run_iteration, recipe, inputs)
    assert error.startswith("ZeroDivisionError") and lines == [update, "return inputs.logprobs / (1 // 0), {}"]


def test_exception_in_a_concurrent_block_points_at_the_request_of_the_recipe(ranks, inputs, tmp_path):
    update = 'metrics = job.actor.update(batch, broken_loss, "token-mean")  # expected'
    recipe = written(
        tmp_path,
        "with job.concurrent_roles():",
        "    ref_logprobs = job.reference.compute_logprobs(batch)",
        f"    {update}",
        "    old_logprobs = job.actor.compute_logprobs(batch)",
        "return metrics",
    )
    ((error, lines, notes),) = ranks.run(1, run_iteration, recipe, inputs)
    assert error.startswith("ZeroDivisionError")
    assert lines == ["with job.concurrent_roles():", update, "return inputs.logprobs / (1 // 0), {}"]
    assert notes[0].startswith(f"actor.update was requested at {recipe}:")


GENERATING = """
from dataclasses import replace
from verl_mg.config import RecipeConfig

class Config(RecipeConfig):
    ...

def roles(cfg):
    return {"actor", "rollout", "reward"}

def score(sample):
    return {}[sample.answer]

def iteration(job, cfg):
    job.rollout.update_weights(job.actor)
    prompts = job.prompts.next_batch(2)
"""


def generating(tmp_path: Path, *lines: str) -> tuple[Path, tuple[str, ...]]:
    recipe = written(tmp_path, *lines, head=GENERATING)
    return recipe, ("rollout.engine=hf", "rollout.max_new_tokens=2", f"reward.function={recipe}:score")


def test_exception_in_the_engine_points_at_the_generate_of_the_recipe(ranks, inputs, tmp_path):
    generate = "batch = job.rollout.generate([replace(prompt, tokens=(99999,)) for prompt in prompts])"
    recipe, overrides = generating(tmp_path, generate, "job.reward.wait(batch)", "return {}")
    ((error, lines, _),) = ranks.run(1, run_iteration, recipe, inputs, overrides)
    assert error.startswith("UserError: request 0: a token id is outside the vocabulary") and lines == [generate]


def test_exception_in_a_reward_function_points_at_the_wait_of_the_recipe(ranks, inputs, tmp_path):
    wait = 'batch["reward"] = job.reward.wait(batch)  # expected'
    recipe, overrides = generating(tmp_path, "batch = job.rollout.generate(prompts)", wait, "return {}")
    ((error, lines, _),) = ranks.run(1, run_iteration, recipe, inputs, overrides)
    assert error.startswith("UserError: ") and "raised KeyError" in error and lines == [wait]


def test_export_inside_a_concurrent_block_is_refused(ranks, inputs, tmp_path):
    recipe = written(tmp_path, "with job.concurrent_roles():", "    job.actor.save(None, None)", "return {}")
    ((error, lines, _),) = ranks.run(1, run_iteration, recipe, inputs)
    assert error.startswith("RuntimeError: actor.save is called in a `with job.concurrent_roles()` block")
    assert lines[-1] == "job.actor.save(None, None)"


def test_role_that_was_not_requested_raises_naming_recipe_and_remedy(ranks, inputs, tmp_path):
    recipe = written(tmp_path, "job.critic.compute_values(batch)", "return {}")
    ((error, lines, _),) = ranks.run(1, run_iteration, recipe, inputs)
    assert error == f"{UserError.__name__}: recipe broken did not request the role 'critic': add it to roles(cfg)"
    assert lines == ["job.critic.compute_values(batch)"]


def test_printing_a_column_on_one_rank_of_four_does_not_block(ranks, inputs, tmp_path):
    recipe = written(
        tmp_path,
        'batch["old_logprobs"] = job.actor.compute_logprobs(batch)',
        "if dist.get_rank() == 1:",
        '    print(batch["old_logprobs"])',
        "with job.concurrent_roles():",
        '    batch["ref_logprobs"] = column = job.reference.compute_logprobs(batch)',
        "    if dist.get_rank() == 1:",
        "        print(column)",
        "if dist.get_rank() == 2:",
        '    print(batch["ref_logprobs"], column)',
        'return job.actor.update(batch, loss, "token-mean")',
    )
    assert ranks.run(4, run_iteration, recipe, inputs) == [("", [], [])] * 4


def building_error(inputs: Path, folder: Path, *overrides: str) -> str:
    """The error of building a job."""
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "sft.py")
    config = load_config(None, [*files_of(inputs, folder), *overrides], recipe.config)
    with pytest.raises(UserError) as caught:
        RunningJob(config, {"actor"}, job_store(), recipe=recipe.name)
    return str(caught.value)


def test_job_with_unknown_field_of_megatron_core_ends_before_a_model_is_built(ranks, inputs, tmp_path):
    (tmp_path / "config.json").write_bytes((inputs / "model" / "config.json").read_bytes())
    given = (f"model.path={tmp_path}", "megatron.ddp.overlap_gradients=true")  # no weights, no tokenizer
    (error,) = ranks.run(1, building_error, inputs, tmp_path, *given)
    assert error.startswith("megatron.ddp.overlap_gradients: megatron-core ")
