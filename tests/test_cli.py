"""What a user meets: one clear line and exit code 2 for every mistake, from real ranks under a real launcher."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.json_lines import write_lines
from tests.helpers.launched import Ended, finished, torchrun
from tests.helpers.tiny_jobs import logged
from tests.helpers.tiny_models import daily_of, tiny_model
from verl_mg.models.tiny_model import make_tiny_model

GRPO = "recipes/grpo.py"
SMALL = ["job.iterations=1", "rollout.max_new_tokens=4", "algorithm.prompts_per_iteration=2", "job.console=false"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    tiny_model(folder / "model", "qwen3")
    make_tiny_model(folder / "odd", "qwen3", hidden=24, heads=3, kv_heads=3)
    tiny_model(folder / "rope", "llama")
    config = json.loads((folder / "rope" / "config.json").read_text())
    (folder / "rope" / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_type": "spiral"}}))
    lines = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(9)]
    write_lines(folder / "good.jsonl", lines)
    (folder / "bad.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "1+2=",\n')
    (folder / "long.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "' + "1+" * 40 + '1="}\n')
    broken = folder / "broken"
    tiny_model(broken, "qwen3")
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    return folder


def start(arguments: list[str], ranks: int, warm: bool = True) -> Ended:
    return finished([*(torchrun(ranks) if ranks > 1 else []), "-m", "verl_mg", *arguments], warm=warm)


def train(inputs: Path, output: Path, ranks: int, *overrides: str, recipe: str = GRPO) -> Ended:
    common = [f"model.path={inputs / 'model'}", f"data.train={inputs / 'good.jsonl'}", f"job.output={output}", *SMALL]
    return start(["train", recipe, *common, *overrides], ranks)


def assert_one_clear_line(result: Ended, *words: str) -> None:
    line = result.refusal()
    assert all(word in line for word in words), line


MISTAKES = {
    "missing model": (["model.path=nowhere/model"], ["nowhere/model: no such model directory", "model.path"]),
    "layout and ranks": (["actor.layout=tp4"], ["actor.layout=tp4", "2"]),
    "layout and heads": (
        ["actor.layout=tp2", "model.path={inputs}/odd"],
        ["actor.layout=tp2", "does not divide the 3 attention heads. Choose tp from 1, 3."],
    ),
    "unknown rope": (["model.path={inputs}/rope"], ["config.json", "spiral"]),
    "missing test file": (["data.test=nowhere.jsonl", "evaluation.every=1"], ["nowhere.jsonl: no such data file"]),
    "malformed line": (["data.train={inputs}/bad.jsonl"], ["bad.jsonl:2"]),
    "unknown key": (["actor.layuot=tp2"], ["actor.layuot: unknown key", "Did you mean actor.layout?"]),
    "long prompt": (["data.train={inputs}/long.jsonl", "data.max_prompt_tokens=20"], ["long.jsonl:2", "20"]),
    "missing tensor": (["model.path={inputs}/broken"], ["broken", "model.layers.2.mlp.up_proj.weight"]),
    "prompt fills the positions": (["rollout.max_new_tokens=64"], ["64"]),
    "unknown reward": (["reward.function=verl_mg.rewards.exact:scoer"], ["scoer", "score"]),
}
MET_ELSEWHERE = {"missing model", "missing test file", "long prompt"}
"""Their messages have tests of their own, and they are found where others are: in the model and in the data."""


@pytest.mark.parametrize("mistake", daily_of(MISTAKES, *(MISTAKES.keys() - MET_ELSEWHERE)))
def test_train_with_a_mistake_on_two_ranks_exits_with_one_line(inputs, tmp_path, mistake):
    overrides, words = MISTAKES[mistake]
    result = train(inputs, tmp_path / "run", 2, *(o.format(inputs=inputs) for o in overrides))
    assert_one_clear_line(result, *words)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_train_with_an_error_on_one_rank_ends_all_and_can_be_repeated(inputs, tmp_path):
    """The reward fails where rank 1 scores: rank 0 waits in a collective and must not hang."""
    (tmp_path / "reward.py").write_text(
        "import os\ndef score(sample):\n    if os.environ['RANK'] == '1': raise OSError('no ruler')\n    return 0\n"
    )
    result = train(inputs, tmp_path / "run", 2, f"reward.function={tmp_path / 'reward.py'}:score")
    assert_one_clear_line(result, "reward.py:score", "OSError: no ruler")
    (tmp_path / "reward.py").write_text("def score(sample): return 0\n")
    train(inputs, tmp_path / "run", 2, f"reward.function={tmp_path / 'reward.py'}:score").completed()


def test_train_without_launcher_runs_on_one_rank(inputs, tmp_path):
    train(inputs, tmp_path / "run", 1).completed()
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    again = train(inputs, tmp_path / "run", 1).completed()  # which resumes, and has no iteration left
    assert "resumes after iteration 1" in again.err
    assert_one_clear_line(train(inputs, tmp_path / "run", 1, "job.seed=1"), "seed=0, now seed=1")


def test_eval_on_two_ranks_prints_json_and_two_evaluations_are_compared(inputs, tmp_path):
    (tmp_path / "reward.py").write_text("def score(sample): return float(len(sample.response) % 2)\n")
    common = [
        f"sums={inputs / 'good.jsonl'}",
        "rollout.max_new_tokens=4",
        f"reward.function={tmp_path}/reward.py:score",
    ]
    results = []
    for temperature in (0, 1):
        output = tmp_path / str(temperature)
        changes = [f"evaluation.temperature={temperature}", "--output", str(output), "--json"]
        results.append(start(["eval", str(inputs / "model"), "--set", *common, *changes], 2).completed())
    report = json.loads(results[0].out)
    assert report["sets"]["sums"]["prompts"] == 9 and 0 <= report["sets"]["sums"]["metrics"]["reward"]["value"] <= 1
    compared = start(["eval", "--compare", str(tmp_path / "0"), str(tmp_path / "1")], 1)
    header, row, *_, settings = compared.out.splitlines()
    assert header.split() == ["set", "metric", "first", "second", "difference", "95%", "interval", "p"]
    assert row.split()[:2] == ["sums", "reward"] and "'temperature': 0.0" in settings
    assert_one_clear_line(start(["eval", str(inputs / "model")], 2), "data.test", "Write --set NAME=PATH")
    assert_one_clear_line(start(["eval", "--compare", str(tmp_path), str(tmp_path / "1")], 1), "evaluation.json")


def test_command_line_with_a_mistake_exits_with_one_line(inputs, tmp_path):
    assert_one_clear_line(
        train(inputs, tmp_path / "run", 1, "algorithm.group_size=1"), "algorithm.group_size: 1 is invalid"
    )
    assert_one_clear_line(start(["train"], 1), "recipe")
    assert_one_clear_line(start(["trian"], 1, warm=False), "trian")


def test_recipe_with_a_bug_keeps_its_traceback(inputs, tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "from verl_mg.config import RecipeConfig\nclass Config(RecipeConfig):\n    prompts_per_iteration: int = 1\n"
        "def roles(cfg): return {'actor'}\ndef iteration(job, cfg): raise KeyError('oh')\n"
    )
    result = train(inputs, tmp_path / "run", 1, recipe=str(recipe))
    assert result.code == 1 and "KeyError: 'oh'" in result.err


def test_grpo_on_the_real_gsm8k_trains(gsm8k, tmp_path):
    make_tiny_model(tmp_path / "model", "qwen3", max_positions=2048)
    config = "recipes/configs/grpo_gsm8k_tiny.yaml"
    paths = {"data.train": gsm8k / "train.jsonl", "model.path": tmp_path / "model", "job.output": tmp_path / "run"}
    overrides = [f"{key}={path}" for key, path in paths.items()]
    start(["train", GRPO, "--config", config, "job.iterations=2", *overrides], 2).completed()
    lines = logged(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    assert all("reward/answered" in line and line["mismatch/mean_abs"] < 1e-4 for line in lines)
