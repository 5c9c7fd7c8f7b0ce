"""The calculator task: its data, its reward, and a tiny model that learns to call the tool."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from transformers import AutoTokenizer

from tests.helpers import warm_start
from tests.helpers.traces import needs_sglang
from verl_mg.agents.tool_calls import ToolCall
from verl_mg.agents.tools.chat_format import ToolCallFormat, ToolResult
from verl_mg.agents.tools.load import load_tools
from verl_mg.config import load_config
from verl_mg.job.recipe import load_recipe
from verl_mg.quickstart import accuracies
from verl_mg.recipes.tasks.calculator import CALL, make, score
from verl_mg.rewards import Sample, load_reward

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "recipes"
ASYNC = ["rollout.engine=sglang", "rollout.num_ranks=1", "rollout.mode=async", "algorithm.old_logprobs=rollout"]
MODES = {"sync": [], "async": [*ASYNC, "actor.layout=tp1", "rollout.max_running_requests=64"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("calculator")
    make(folder)
    return folder


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_calculator_data_shows_no_question_before_its_prompt(folder):
    def sums(name: str) -> list[str]:
        return [record["prompt"][0]["content"] for record in records(folder / "data" / f"{name}.jsonl")]

    train, test, shown = sums("train"), sums("test"), sums("demonstrations")
    assert len({*train, *test, *shown}) == len(train) + len(test) + len(shown)
    assert {len(text) for text in train + test} == {9}


def test_calculator_data_half_of_the_answers_have_no_call(folder):
    first = [record for record in records(folder / "data" / "demonstrations.jsonl") if len(record["prompt"]) == 1]
    called = sum(record["answer"].startswith(CALL[0]) for record in first)
    assert called / len(first) == pytest.approx(0.5, abs=0.01)


@needs_sglang
def test_calculator_demonstrations_equal_the_rollout_tokens(folder):
    """Two turns of the rollout's components give the tokens of the two demonstrations."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    requested, continued = records(folder / "data" / "demonstrations.jsonl")[1:3]
    chat_format = ToolCallFormat(tokenizer, load_tools(["verl_mg.agents.tools.builtin:calculator"]), "qwen25")
    tokens = tokenizer(continued["prompt"][1]["content"])["input_ids"]
    assert len(tokens) == len(tokenizer(requested["answer"])["input_ids"]) == 15
    arguments = json.dumps({"expression": continued["prompt"][0]["content"]})
    assert chat_format.calls(tokens) == [ToolCall("call00000", "calculator", arguments)]
    begin = tokenizer.apply_chat_template(continued["prompt"][:1], tokenize=False, add_generation_prompt=True)
    seen = chat_format.observation(tokenizer.eos_token_id, [ToolResult("calculator", continued["answer"])])
    whole = tokenizer.apply_chat_template(continued["prompt"], tokenize=False, add_generation_prompt=True)
    assert [*tokenizer(begin)["input_ids"], *tokens, tokenizer.eos_token_id, *seen] == tokenizer(whole)["input_ids"]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("42", 1.0),
        ("<tool_call>\n...\n</tool_call><tool>42\n42", 1.0),
        ("<tool_call>\n...\n</tool_call><tool>42\n", 0.0),
        ("<tool_call>\n...\n</tool_call><tool>42\n41", 0.0),
        ("42\n</tool_call>", 0.0),
    ],
)
def test_calculator_reward_reads_the_answer_of_the_policy(response, reward):
    given = score(Sample("", response, "42", {}, "stop"))
    assert (given.value, given.parts["called"]) == (reward, float(CALL[0] in response))


@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_calculator_configurations_are_complete(stage):
    recipe = load_recipe(RECIPES / f"{stage}.py")
    config = load_config(RECIPES / "configs" / f"calculator_{stage}.yaml", [], recipe.config)
    assert config.model.path.parts[:2] == config.data.train.parts[:2] == ("runs", "calculator")
    if stage == "grpo":
        assert load_reward(str(ROOT / config.reward.function))
        assert [tool.name for tool in load_tools(config.rollout.tools)] == ["calculator"]


def train(stage: str, folder: Path, model: str, data: str, *overrides: str) -> None:
    subprocess.run(
        [
            *(warm_start.shared().python, "-m", "verl_mg.launch", "--nproc-per-node", "2", "-m", "verl_mg"),
            *("train", str(RECIPES / f"{stage}.py"), "--config", str(RECIPES / "configs" / f"calculator_{stage}.yaml")),
            f"model.path={folder / model}",
            f"data.train={folder / 'data' / data}",
            f"job.output={folder / stage}",
            *overrides,
        ],
        check=True,
        cwd=ROOT,
        env=os.environ | warm_start.shared().environment,
    )


@pytest.fixture(scope="module")
def imitated(folder) -> str:
    """Trains the model on demonstrations; returns its path in the folder."""
    train("sft", folder, "model", "demonstrations.jsonl")
    return "sft/model"


@needs_sglang
@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES)
def test_calculator_tiny_model_learns_to_call(folder, imitated, mode):
    run = folder / mode
    overrides = [f"data.test={folder / 'data' / 'test.jsonl'}", "job.save=false", f"job.output={run}", *MODES[mode]]
    train("grpo", folder, imitated, "train.jsonl", *overrides)
    before, after = accuracies(run / "metrics.jsonl")
    print(f"\n{mode}: accuracy {before:.2f} before, {after:.2f} after")
    assert 0.05 < before < 0.7, "imitation is to leave something to learn"
    assert after > before + 0.2
    first, last = (called(run / "samples" / name) for name in ("000001", "000024"))
    assert sum(last) / len(last) > 0.9 > 0.75 > sum(first) / len(first)


def called(samples: Path) -> list[float]:
    """Returns for each sample of an iteration whether it called a tool."""
    parts = [part for file in samples.iterdir() for part in parquet.read_table(file)["parts"].to_pylist()]
    return [dict(part)["called"] for part in parts]
