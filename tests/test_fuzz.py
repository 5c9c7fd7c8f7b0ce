"""Mutated configurations, data files, checkpoints and models: each run ends well, or in one line with exit code 2."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.fuzz_examples import (
    CHECKPOINT,
    LARGE,
    MODEL,
    MODEST,
    RECIPES,
    REWARD,
    configurations,
    damages,
    data_files,
    records,
    tiny_job,
)
from tests.helpers.fuzzing import rewrite_sums, run_command
from verl_mg.errors import EXIT_CODE
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.run.checkpointer import SUMS


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the tiny job; each example works on a copy."""
    folder = tmp_path_factory.mktemp("inputs")
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 16, "max_positions": 64}
    make_tiny_model(folder / "model", "qwen3", characters="0123456789+-*=() abc\n", init_std=0.2, **sizes)
    lines = [json.dumps(record) + "\n" for record in records()]
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "test.jsonl").write_text("".join(lines[:3]))
    (folder / "reward.py").write_text(REWARD)
    return folder


each_of = partial(settings, suppress_health_check=list(HealthCheck))  # an example is a process


def few_or_many(few: int, many: int) -> pytest.MarkDecorator:
    """`examples`: few of them in each run of the suite, many nightly."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.nightly)])


@dataclass
class Runs:
    """Runs jobs in a folder that is made anew for each, and counts how they end."""

    inputs: Path
    folder: Path
    ends: Counter[int | None] = field(default_factory=Counter)

    def begin(self, inputs: Path | None = None) -> Path:
        """A folder with a copy of the inputs."""
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        shutil.copytree(inputs or self.inputs, self.folder)
        return self.folder

    def check(self, recipe: str, job: dict[str, Any] | bytes, *overrides: str) -> str:
        """Run a configuration there; returns its standard error."""
        text = job if isinstance(job, bytes) else yaml.safe_dump(job).encode()
        (self.folder / "job.yaml").write_bytes(text)
        arguments = ["train", str(RECIPES / f"{recipe}.py"), "--config", "job.yaml", *overrides]
        ended = run_command(arguments, self.folder)
        self.ends[ended.code] += 1
        assert not ended.problem(), f"{ended.problem()}\n{ended.err[-6000:]}"
        return ended.err

    def some_of_both(self, share: float) -> bool:
        """Whether at least that share ended well, and was refused."""
        return min(self.ends[0], self.ends[EXIT_CODE]) >= share * self.ends.total()


@pytest.fixture
def runs(inputs: Path, tmp_path: Path) -> Runs:
    return Runs(inputs, tmp_path / "above" / "job")


@pytest.fixture
def checkpointed(runs: Runs, tmp_path: Path) -> dict[str, Path]:
    """The folder of a job with two checkpoints, by recipe; GRPO's has samples that wait for the rest of their group."""
    made = {}
    for recipe in ("sft", "grpo"):
        runs.begin()
        runs.check(recipe, checkpointing_job(recipe), "job.iterations=2")
        made[recipe] = runs.folder.rename(tmp_path / recipe)
    assert runs.ends == {0: 2}
    runs.ends.clear()
    return made


def checkpointing_job(recipe: str) -> dict[str, Any]:
    tree = tiny_job(recipe) | {"checkpoint": {"every": 1}}
    if recipe == "grpo":
        tree["rollout"] |= {"partial_rollout": True, "extra_prompts": 2, "max_running_requests": 3}
    return tree


@few_or_many(8, 250)
def test_fuzz_of_configurations_ends_well_or_in_one_line(runs, examples):
    @each_of(max_examples=examples)
    @given(configurations())
    def one(made):
        runs.begin()
        runs.check(*made)

    one()
    assert runs.some_of_both(0.15), runs.ends


@few_or_many(8, 125)
def test_fuzz_of_data_files_ends_well_or_in_one_line(runs, examples):
    @each_of(max_examples=examples)
    @given(data_files())
    def one(made):
        recipe, overrides, name, content = made
        (runs.begin() / name).write_bytes(content)
        runs.check(recipe, tiny_job(recipe), f"data.train={name}", *overrides)

    one()
    assert runs.some_of_both(0.05), runs.ends


@few_or_many(4, 95)
def test_fuzz_of_checkpoints_ends_well_or_in_one_line(runs, checkpointed, examples):
    fell_back = 0

    @each_of(max_examples=examples)
    @given(st.sampled_from(sorted(checkpointed)), damages(CHECKPOINT, MODEST | LARGE), st.integers(0, 3).map(bool))
    def one(recipe, done, new_sums):
        nonlocal fell_back
        last = runs.begin(checkpointed[recipe]) / "run" / "checkpoints" / "000002"
        for damage in done:
            damage.do(last)
        if new_sums and not any(damage.file == SUMS for damage in done):
            rewrite_sums(last)
        err = runs.check(recipe, checkpointing_job(recipe), "job.iterations=3")
        fell_back += "resumes after iteration 1" in err

    one()
    assert runs.some_of_both(0.05), runs.ends
    assert fell_back >= examples // 20


@few_or_many(4, 30)
def test_fuzz_of_models_ends_well_or_in_one_line(runs, examples):
    @each_of(max_examples=examples)
    @given(st.sampled_from(("sft", "grpo")), damages(MODEL, MODEST))  # a billion layers are right, and take for ever
    def one(recipe, done):
        folder = runs.begin()
        for damage in done:
            damage.do(folder / "model")
        runs.check(recipe, tiny_job(recipe))

    one()
    assert runs.some_of_both(0.05), runs.ends
