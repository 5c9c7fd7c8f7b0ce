"""The quickstart: its data, its commands, and a short run of the whole."""

import json
from pathlib import Path

import pytest
import torch

from tests.helpers import warm_start
from tests.helpers.traces import needs_sglang
from verl_mg import quickstart as module
from verl_mg.cli import main
from verl_mg.config import load_config
from verl_mg.errors import UserError
from verl_mg.job.recipe import load_recipe
from verl_mg.quickstart import accuracies, divided, quickstart, train_commands, write_sums

SHORT_SFT = ["job.iterations=2", "algorithm.examples_per_iteration=8"]
SHORT_GRPO = ["job.iterations=2", "algorithm.prompts_per_iteration=4", "algorithm.group_size=2", "evaluation.prompts=8"]


def sums(file: Path) -> dict[str, str]:
    lines = map(json.loads, file.read_text().splitlines())
    return {line["prompt"]: line["answer"] for line in lines}


def parsed(command: list[str]):
    """The configuration that the ranks of a command would read."""
    words = command[command.index("train") + 1 :]
    config, recipe = words[words.index("--config") + 1], next(word for word in words if word.endswith(".py"))
    return load_config(config, [word for word in words if "=" in word], load_recipe(recipe).config)


def test_sums_of_quickstart_are_split_without_overlap(tmp_path):
    write_sums(tmp_path)
    train, test = sums(tmp_path / "train.jsonl"), sums(tmp_path / "test.jsonl")
    assert len(test) == 500
    assert not train.keys() & test.keys()
    assert len(train) + len(test) == 100 * 100
    assert (train | test)["17+25="] == "42"
    write_sums(tmp_path / "again")
    assert (tmp_path / "again/test.jsonl").read_bytes() == (tmp_path / "test.jsonl").read_bytes()


def test_quickstart_commands_name_files_of_the_folder():
    folder = Path("some/folder")
    sft, grpo = map(parsed, train_commands(folder, of_grpo=["job.iterations=7"]))
    assert (sft.model.path, sft.job.output) == (folder / "model", folder / "sft")
    assert (grpo.model.path, grpo.job.output) == (folder / "sft/model", folder / "grpo")
    assert (grpo.data.train, grpo.data.test) == (folder / "data/train.jsonl", folder / "data/test.jsonl")
    assert grpo.job.iterations == 7
    _, grpo = map(parsed, train_commands(folder))  # whose learning rate decays over the whole run
    assert grpo.actor.optimizer.decay_steps == grpo.job.iterations * grpo.algorithm.num_minibatches


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 1), (8, 2)])
def test_quickstart_commands_start_no_more_ranks_than_gpus(monkeypatch, gpus, ranks):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for command in train_commands(Path("x")):
        assert command[command.index("--nproc-per-node") + 1] == str(ranks)


def test_overrides_of_quickstart_go_to_the_jobs_that_have_their_keys():
    given = [
        "rollout.engine=sglang",
        "actor.layout=tp2",
        "algorithm.examples_per_iteration=8",
        "algorithm.group_size=2",
    ]
    sft, grpo = map(parsed, train_commands(Path("x"), *divided(given)))
    assert (sft.rollout.engine, sft.actor.layout, sft.algorithm.examples_per_iteration) == ("hf", "tp2", 8)
    assert (grpo.rollout.engine, grpo.actor.layout, grpo.algorithm.group_size) == ("sglang", "tp2", 2)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.path=x", "model.path: the quickstart sets it. Leave it out, or "),
        ("algorithm.examples=8", "quickstart_grpo.yaml: algorithm.examples: unknown key. "),
        ("rollout.engin=sglang", "quickstart_grpo.yaml: rollout.engin: unknown key. Did you mean rollout.engine?"),
        ("job.iterations=none", "quickstart_sft.yaml: job.iterations: "),
        ("sglang", "'sglang': not an override. "),
    ],
)
def test_quickstart_with_a_wrong_override_is_one_line_and_removes_nothing(override, words, tmp_path, capsys):
    (tmp_path / "sft").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["quickstart", "--output", str(tmp_path), override])
    assert ended.value.code == 2 and (tmp_path / "sft").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line


def test_accuracies_of_a_run_are_first_and_last(tmp_path):
    steps = [{"eval/reward": 0.25}, {"reward/mean": 0.5}, {"eval/reward": 0.5}, {"eval/reward": 0.75}]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": i} | step) + "\n" for i, step in enumerate(steps)))
    assert accuracies(file) == (0.25, 0.75)


def test_quickstart_without_recipes_raises_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RECIPES", tmp_path / "recipes")
    with pytest.raises(UserError, match=r"sft\.py: no such file\. .* checkout"):
        quickstart(str(tmp_path / "output"))
    assert not (tmp_path / "output").exists()


def test_quickstart_with_failing_job_exits_with_its_code(tmp_path, warm_jobs):
    with pytest.raises(SystemExit) as ended:
        quickstart(str(tmp_path), sft_overrides=["job.iterations=none"])
    assert ended.value.code == 2
    assert not (tmp_path / "grpo").exists()


@pytest.fixture
def warm_jobs(monkeypatch):
    warm = warm_start.shared()
    monkeypatch.setattr(module.sys, "executable", warm.python)
    monkeypatch.setenv("PYTHON_EXEC", warm.python)


@needs_sglang
@pytest.mark.nightly
def test_quickstart_with_sglang_generates_with_its_engines(tmp_path, capfd, warm_jobs):
    few = ["algorithm.examples_per_iteration=8", *SHORT_GRPO]
    main(["quickstart", "--output", str(tmp_path), "rollout.engine=sglang", *few])
    assert "rollout.engine=sglang" in capfd.readouterr().out
    steps = list(map(json.loads, (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()))
    # Engine and trainer compute the same in float32.
    assert sum("mismatch/mean_abs" in step for step in steps) == 2 and all(
        step["mismatch/mean_abs"] < 1e-4 for step in steps if "mismatch/mean_abs" in step
    )


def test_quickstart_with_short_jobs_writes_all_outputs(tmp_path, capfd, warm_jobs):
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "metrics.jsonl").write_text("of an earlier quickstart\n")
    (tmp_path / "notes.txt").write_text("of the user\n")
    quickstart(str(tmp_path), sft_overrides=SHORT_SFT, grpo_overrides=SHORT_GRPO)
    for file in ("model/config.json", "sft/model/model.safetensors", "grpo/reward_curve.png", "notes.txt"):
        assert (tmp_path / file).is_file(), file
    assert any((tmp_path / "grpo" / "samples").iterdir())
    printed = capfd.readouterr().out
    assert printed.count("$ ") == 2
    accuracy, curve, samples, total = printed.splitlines()[-4:]
    assert accuracy.startswith("accuracy on held-out sums: ") and "before GRPO" in accuracy and "after" in accuracy
    assert str(tmp_path / "grpo" / "reward_curve.png") in curve
    assert str(tmp_path / "grpo" / "samples") in samples
    assert total.startswith("total time: ")
