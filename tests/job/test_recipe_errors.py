"""Exceptions of role calls point at the line of the recipe that made the call; printing a column never blocks."""

import re
import traceback
from pathlib import Path

import pytest

from tests.helpers.rank_pool import job_store, refusal
from tests.helpers.tiny_jobs import files_of, write_sums
from tests.helpers.tiny_models import tiny_model, vision_model
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
    path: Path, inputs: Path, overrides: tuple[str, ...] = ("reference.ranks=0",)
) -> tuple[str, list[str], list[str]]:
    """The error of one iteration: its text, the lines of the recipe in its traceback, its notes."""
    recipe = load_recipe(path)
    options = [*files_of(inputs, path.parent), "actor.ranks=0", *overrides]
    config = load_config(None, options, recipe.config)
    job = RunningJob(config, requested_roles(recipe, config), job_store(), recipe=recipe.name)
    try:
        one_iteration(recipe, job, 1)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.line or "" for frame in frames if frame.filename == str(path)]
        return f"{type(error).__name__}: {error}", lines, getattr(error, "__notes__", [])
    return "", [], []


def recipe_file(tmp_path: Path, *lines: str, head: str = HEAD) -> Path:
    recipe = tmp_path / "broken.py"
    recipe.write_text(head + "".join(f"    {line}\n" for line in lines))
    return recipe


def test_role_of_a_family_that_megatron_has_not_names_the_backend_to_write(ranks, inputs, tmp_path):
    model = vision_model("qwen3_vl")
    changes = ("reference.ranks=0", f"model.path={model}", "actor.backend=fsdp")
    (error,) = ranks.run(1, refusal, run_iteration, recipe_file(tmp_path), inputs, changes)
    begin = f"reference.backend=megatron: {model / 'config.json'}: model_type 'qwen3_vl' is not supported. Choose from "
    assert error.startswith(begin) and error.endswith(". Or write reference.backend=fsdp.")


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


UPDATE = 'job.actor.update(batch, broken_loss, "token-mean")  # expected'
ZERO = "return inputs.logprobs / (1 // 0), {}"
IN_BLOCK = ["with job.concurrent_roles():", "    ref_logprobs = job.reference.compute_logprobs(batch)", f"    {UPDATE}"]
GENERATE = "batch = job.rollout.generate([replace(prompt, tokens=(99999,)) for prompt in prompts])"
WAIT = 'batch["reward"] = job.reward.wait(batch)  # expected'


@pytest.mark.parametrize(
    ("head", "written", "error", "lines", "note"),
    [
        (HEAD, ["job.reference.compute_logprobs(batch)", UPDATE], "ZeroDivisionError", [UPDATE, ZERO], ""),
        (
            HEAD,
            [*IN_BLOCK, "    old_logprobs = job.actor.compute_logprobs(batch)"],
            "ZeroDivisionError",
            ["with job.concurrent_roles():", UPDATE, ZERO],
            "actor.update was requested at RECIPE:",
        ),
        (
            GENERATING,
            [GENERATE, "job.reward.wait(batch)"],
            "UserError: request 0: a token id is outside the vocabulary",
            [GENERATE],
            "",
        ),
        (GENERATING, ["batch = job.rollout.generate(prompts)", WAIT], "UserError: .* raised KeyError", [WAIT], ""),
        (
            HEAD,
            ["with job.concurrent_roles():", "    job.actor.save(None, None)"],
            r"RuntimeError: actor\.save is called in a `with job\.concurrent_roles\(\)` block",
            ["job.actor.save(None, None)"],
            "",
        ),
        (
            HEAD,
            ["job.critic.compute_values(batch)"],
            r"UserError: recipe broken did not request the role 'critic': add it to roles\(cfg\)$",
            ["job.critic.compute_values(batch)"],
            "",
        ),
    ],
)
def test_exception_points_at_the_line_of_the_recipe_that_caused_it(
    ranks, inputs, tmp_path, head, written, error, lines, note
):
    recipe = recipe_file(tmp_path, *written, "return {}", head=head)
    generating = ("rollout.engine=hf", "rollout.max_new_tokens=2", f"reward.function={recipe}:score")
    overrides = generating if head is GENERATING else ("reference.ranks=0",)
    ((found, seen, notes),) = ranks.run(1, run_iteration, recipe, inputs, overrides)
    assert re.match(error, found), found
    assert seen == lines
    assert "".join(notes).startswith(note.replace("RECIPE", str(recipe)))


def test_printing_a_column_on_one_rank_of_four_does_not_block(ranks, inputs, tmp_path):
    recipe = recipe_file(
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
