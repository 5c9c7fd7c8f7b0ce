"""Folders of papers: the plan is that of today, the launch file starts it, and prepared data trains a tiny model."""

import asyncio
import math
import os
import re
import subprocess
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from tests.helpers.json_lines import read_lines
from tests.helpers.published_rows import write_published
from tests.helpers.tiny_jobs import RECIPES, logged, run_recipe
from tools import prepare_data
from tools.docs.write_paper_plans import PAPERS, plan_command, plan_text
from verl_mg.config import load_config
from verl_mg.job.recipe import load_recipe, requested_roles
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.rewards import Sample, load_reward

ROOT = RECIPES.parent
FOLDERS = sorted(file.parent for file in PAPERS.glob("*/config.yaml"))
FILES = {"README.md", "config.yaml", "launch.sh", "plan.txt", "results.csv"}
LUCKY = "def lucky(sample): return float(sum(map(ord, sample.response)) % 2)\n"
"""A random model is never right, so the reward is one that half of its answers earn."""

FAMILIES = {"qwen3_30b": "qwen3_moe", "qwen3_235b": "qwen3_moe", "qwen2_5": "qwen2", "deepseek_coder": "llama"}
TRAINED_DAILY = ("dapo_qwen2_5_32b", "pf_ppo_deepseek_coder_6_7b", "prime_qwen2_5_math_7b")
REWARDED_DAILY = ("dapo_qwen2_5_32b", "dr_grpo_qwen2_5_math_7b", "prime_qwen2_5_math_7b")
PLANNED_DAILY = ("dapo_qwen2_5_32b", "pf_ppo_deepseek_coder_6_7b")
SMALLER = {
    "dapo": ["algorithm.overlong_buffer=4", "evaluation.samples=2"],
    "vapo": ["algorithm.critic_warmup=1", "evaluation.samples=2"],
    "prime": ["algorithm.prompts_per_iteration=2"],
    "gspo": ["evaluation.samples=2"],
    "pf_ppo": ["algorithm.buffer_samples=24"],
}
"""Overrides for three iterations of four prompts and eight tokens."""


def recipe_of(folder: Path) -> Path:
    return ROOT / plan_command(folder)[1]


def some(names: tuple[str, ...]) -> list[object]:
    """All folders, those of the names every day."""
    marks = [() if folder.name in names else pytest.mark.nightly for folder in FOLDERS]
    return [pytest.param(folder, marks=mark, id=folder.name) for folder, mark in zip(FOLDERS, marks, strict=True)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """The folder `data` that a command of a README makes, of a few published rows."""
    folder = tmp_path_factory.mktemp("papers")
    options = ["--out", str(folder / "data"), "--without", str(folder / "math_500.jsonl")]
    for name, files in write_published(folder).items():
        sources = [argument for file in files for argument in ("--source", str(file))]
        assert prepare_data.main([name, *options, *sources]) == 0
    return folder


def test_index_lists_every_folder_and_each_has_its_files():
    index = (PAPERS / "README.md").read_text(encoding="utf-8")
    assert len(FOLDERS) == 8
    for folder in FOLDERS:
        assert index.count(f"]({folder.name}/README.md)") == 1
        assert {file.name for file in folder.iterdir()} - {"reward.py", "__pycache__"} == FILES


@pytest.mark.parametrize("folder", some(PLANNED_DAILY))
def test_plan_of_a_folder_is_that_of_its_command(folder, monkeypatch):
    monkeypatch.chdir(ROOT)
    written = (folder / "plan.txt").read_text(encoding="utf-8")
    assert written == plan_text(folder), "python -m tools.docs.write_paper_plans"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_readme_of_a_folder_names_every_value_that_its_configuration_sets(folder):
    """A key in the table of the README has the value that the file gives it."""
    recipe = load_recipe(recipe_of(folder))
    config = load_config(folder / "config.yaml", [], recipe.config)
    requested_roles(recipe, config)
    text = (folder / "README.md").read_text(encoding="utf-8")
    table = text[text.index("| published") :].split("\n\n")[0]
    keys = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)=([^`]*)`", table)
    assert len(keys) >= 6
    for key, value in keys:
        written = load_config(folder / "config.yaml", [f"{key}={value}"], recipe.config)
        assert attrgetter(key)(config) == attrgetter(key)(written), key
    assert config.job.output == Path("runs/papers") / folder.name


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_launch_file_starts_the_planned_number_of_ranks(folder, tmp_path):
    """`sbatch` and `bash` are programs that print what they are given."""
    for name in ("sbatch", "bash"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$(basename "$0") $RUN $PWD $@"\n')
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["/bin/bash", folder / "launch.sh", "job.seed=1"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    arguments = plan_command(folder)
    ranks = int(arguments[arguments.index("--ranks") + 1])
    nodes = re.search(r"--nodes (\d+)", done.stdout)
    assert 8 * (int(nodes[1]) if nodes else 1) == ranks
    config = (folder / "config.yaml").relative_to(ROOT)
    assert f"{arguments[1]} --config {config} job.seed=1\n" in done.stdout and str(ROOT) in done.stdout
    assert not nodes or f"runs/papers/{folder.name}" in done.stdout


def train(folder: Path, overrides: list[str]) -> None:
    run_recipe(recipe_of(folder), overrides, file=folder / "config.yaml")


@pytest.mark.parametrize("folder", some(TRAINED_DAILY))
def test_paper_at_tiny_scale_trains_on_its_prepared_data(ranks, prepared, tmp_path, folder):
    recipe = recipe_of(folder).stem
    config = load_config(folder / "config.yaml", [], load_recipe(recipe_of(folder)).config)
    (tmp_path / "lucky.py").write_text(LUCKY)
    (family,) = [family for name, family in FAMILIES.items() if name in folder.name]
    stretched = {"rope_type": "linear", "factor": 4.0} if family == "llama" else None
    model = make_tiny_model(
        tmp_path / "model", family, hidden=32, ffn=64, heads=2, kv_heads=2, max_positions=2048, rope_scaling=stretched
    )
    models = {"critic.path": config.critic.path, "reward_model.path": config.reward_model.path}
    roles = ("actor", "critic", "reference", "process_reward", "reward_model")
    overrides = [
        *(f"{key}={model}" for key, path in {"model.path": model, **models}.items() if path),
        *(f"data.{key}={prepared / file}" for key in ("train", "test") if (file := getattr(config.data, key))),
        *(f"{role}.{key}" for role in roles for key in ("layout=tp1", "offload=false")),
        *(f"{role}.recompute=false" for role in ("actor", "critic", "process_reward")),
        *("model.dtype=float32", "rollout.engine=hf", "rollout.layout=tp1", "rollout.replay_routing=false"),
        *("rollout.memory_fraction=0.6", "rollout.max_new_tokens=8"),
        *(["evaluation.every=3", "evaluation.prompts=2"] if config.data.test else []),
        *("algorithm.prompts_per_iteration=4", f"algorithm.group_size={min(config.algorithm.group_size, 6)}"),
        *("algorithm.num_minibatches=2", *SMALLER.get(recipe, [])),
        *([] if config.reward.from_model else [f"reward.function={tmp_path / 'lucky.py'}:lucky"]),
        *("job.iterations=3", "job.save=false", "job.console=false", f"job.output={tmp_path / 'run'}"),
    ]
    ranks.run(1, train, folder, overrides)
    lines = [line for line in logged(tmp_path / "run") if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for role in {"actor", "critic", "process_reward"} & requested_roles(load_recipe(recipe_of(folder)), config):
        norms = [line[f"{role}/grad_norm"] for line in lines if f"{role}/grad_norm" in line]
        assert len(norms) == 3 - (role == "actor" and recipe == "vapo"), role
        assert all(math.isfinite(norm) and norm > 0 for norm in norms), role
    assert all(math.isfinite(line["reward/mean"]) for line in lines)
    if config.data.test:
        assert math.isfinite(lines[-1]["eval/reward"])


RIGHT = {"rewards.dapo": "Add.\nAnswer: {}", "reward.py": "It is $\\boxed{{{}}}$."}
PROGRAM = "```python\nprint(sum(map(int, input().split())))\n```"


@pytest.mark.parametrize("folder", some(REWARDED_DAILY))
def test_reward_of_a_paper_knows_right_answers_to_its_prepared_prompts(prepared, folder, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(folder / "config.yaml", [], load_recipe(recipe_of(folder)).config)
    if config.reward.from_model:
        pytest.skip("the reward is a model")
    reward = load_reward(config.reward.function, config.reward.options)
    template = next(text for name, text in RIGHT.items() if name in str(config.reward.function))
    records = read_lines(prepared / config.data.train)
    for record in records:
        programs = [PROGRAM, "```python\nprint(5)\n```"]
        responses = programs if "tests" in record else [template.format(record["answer"]), "?"]
        samples = [Sample("", response, record.get("answer"), record, "stop") for response in responses]
        right, wrong = (asyncio.run(reward.score([sample]))[0].value for sample in samples)
        assert right == 1.0 and wrong == (0.5 if "tests" in record else wrong) < right
        if recipe_of(folder).stem == "dr_grpo":
            assert asyncio.run(reward.score([replace(samples[0], finish="length")]))[0].value == 0.0
