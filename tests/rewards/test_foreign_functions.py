"""Reward functions that were written for slime and for verl."""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.machine import PEERS
from verl_mg.errors import UserError
from verl_mg.rewards import AsyncScorer, Reward, Sample, load_reward

SLIME_RECORD = {"prompt": "1+1=", "label": "2", "metadata": {"rm_type": "math"}}
SLIME_SAMPLE = Sample("<user>1+1=", " 2\n", "2", SLIME_RECORD, "length", num_tokens=3)

SLIME_FUNCTIONS = """\
from slime.utils.types import Sample

async def rm(args, sample: Sample, **kwargs):
    assert isinstance(sample, Sample) and sample.status == Sample.Status.TRUNCATED and sample.reward is None
    assert (sample.prompt, sample.label, sample.response_length) == ("<user>1+1=", "2", 3)
    assert sample.metadata == {"rm_type": "math"} and args.rm_url == "http://node7"
    sample.metadata["rm_type"] = ""
    return 1 if sample.response.strip() == sample.label else 0

def plain(args, sample): return {"acc": 0.5, "score": 1.0, "pred": "2"}
async def missing(args, sample): return args.rm_url
async def default(args, sample): return getattr(args, "rm_url", 0.25)
async def batched_rm(args, samples, **kwargs): return [len(sample.response) for sample in samples]
async def other(sample): return 1.0
async def spoils(args, sample):
    assert sample.label == 2 and sample.metadata["seen"] == []
    sample.metadata["seen"].append(1)
    return 1.0
async def label(args, sample): return {"score": 1.0, "pred": repr(sample.label)}
"""


@pytest.fixture
def slime_file(tmp_path) -> Iterator[Path]:
    path = tmp_path / "slime_own.py"
    path.write_text(SLIME_FUNCTIONS)
    yield path
    for name in ("slime", "slime.utils", "slime.utils.types"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("function", "options", "reward"),
    [
        ("rm", {"rm_url": "http://node7"}, Reward(1.0)),
        ("plain", {}, Reward(1.0, {"acc": 0.5}, "2")),
        ("plain", {"reward_key": "acc"}, Reward(0.5, {"score": 1.0}, "2")),
        ("default", {}, Reward(0.25)),
        ("batched_rm", {}, Reward(3.0)),
    ],
)
def test_function_for_slime_scores_a_sample(slime_file, function, options, reward):
    assert load_reward(f"slime:{slime_file}:{function}", options)(SLIME_SAMPLE) == reward
    assert SLIME_RECORD["metadata"] == {"rm_type": "math"}, "the function has changed the record"


def test_function_for_slime_gets_the_label_and_changes_no_record(slime_file):
    record = {"prompt": "1+1=", "label": 2, "metadata": {"seen": []}}
    reward = load_reward(f"slime:{slime_file}:spoils")
    assert [reward(Sample("", "", "2", record, "stop")).value for _ in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("record", "answer", "label"),
    [
        ({"label": ["a", 1.5]}, '["a", 1.5]', "['a', 1.5]"),
        ({"label": "A", "solution": "7"}, "7", "'7'"),
        ({"solution": "7"}, "7", "'7'"),
        ({"label": None}, None, "None"),
    ],
)
def test_function_for_slime_gets_the_answer_that_is_configured(slime_file, record, answer, label):
    assert load_reward(f"slime:{slime_file}:label")(Sample("", "", answer, record, "stop")).answer == label


def test_function_for_slime_that_is_installed_gets_samples_of_its_class(slime_file, monkeypatch):
    @dataclass
    class Theirs:
        class Status(Enum):
            TRUNCATED = "truncated"

        prompt: str
        response: str
        response_length: int
        label: str
        status: Status
        metadata: dict[str, Any] = field(default_factory=dict)
        reward: float | None = None

    for name in ("slime", "slime.utils", "slime.utils.types"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["slime.utils.types"])["Sample"] = Theirs
    assert load_reward(f"slime:{slime_file}:rm", {"rm_url": "http://node7"})(SLIME_SAMPLE) == Reward(1.0)


RECORD = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["2"]}},
    "extra_info": {"index": 7},
}
SAMPLE = Sample("1+1=", " 2\n", '{"target": ["2"]}', RECORD, "stop")
VERL_SCORES = PEERS / "verl" / "utils" / "reward_score"

FUNCTIONS = """\
import functools
import numpy

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, solution_str, ground_truth) == ("openai/gsm8k", " 2\\n", {"target": ["2"]})
    assert extra_info == {"index": 7, "num_turns": None, "rollout_reward_scores": {}}
    extra_info["index"] = 0
    return float(solution_str.strip() in ground_truth["target"])

async def later(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return {"score": numpy.float32(scale), "acc": numpy.bool_(True), "pred": "2", "note": "n", "missing": None}

@functools.wraps(later)
def decorated(*args, **kwargs): return later(*args, **kwargs)

def anything(**kwargs): return len(kwargs)
def plain(data_source, solution_str, ground_truth, extra_info): return str(ground_truth) == "2" and not data_source
def without_score(data_source, solution_str, ground_truth, extra_info=None): return {"acc": 1.0}
def nothing(data_source, solution_str, ground_truth, extra_info=None): return None
def sample(sample): return 1.0
def batch(data_sources, solution_strs, ground_truths, extra_infos, bonus=0):
    assert len(data_sources) == len(ground_truths) == len(extra_infos)
    return [{"score": len(text) + bonus, "part": True} for text in solution_strs]
def spoils(data_source, solution_str, ground_truth, extra_info):
    ground_truth["target"].append("3")
    extra_info["seen"].append(1)
    return len(ground_truth["target"]) + len(extra_info["seen"])
def truth(data_source, solution_str, ground_truth, extra_info): return {"score": 1.0, "pred": repr(ground_truth)}
def short(data_sources, solution_strs, ground_truths, extra_infos): return [1.0] * (len(solution_strs) - 1)
import numpy, torch
def numpys(data_sources, solution_strs, ground_truths, extra_infos): return numpy.array(list(map(len, solution_strs)))
def torches(data_sources, solution_strs, ground_truths, extra_infos): return torch.tensor([3.0] * len(solution_strs))
def columns(data_sources, solution_strs, ground_truths, extra_infos): return numpy.ones((1, len(solution_strs)))
def shorts(data_sources, solution_strs, ground_truths, extra_infos): return numpy.ones(0)
def items(data_sources, solution_strs, ground_truths, extra_infos): return (1.0 for _ in solution_strs)
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.parametrize(
    ("function", "options", "reward"),
    [
        ("compute_score", {}, Reward(1.0)),
        ("later", {"scale": 0.5}, Reward(0.5, {"acc": 1.0}, "2")),
        ("decorated", {"scale": 2}, Reward(2.0, {"acc": 1.0}, "2")),
        ("anything", {"a": 1}, Reward(5.0)),
        ("batch", {"bonus": 1}, Reward(4.0, {"part": 1.0})),
        ("numpys", {}, Reward(3.0)),
        ("torches", {}, Reward(3.0)),
    ],
)
def test_function_for_verl_scores_a_sample(file, function, options, reward):
    loaded = load_reward(f"verl:{file}:{function}", options)
    assert (loaded(SAMPLE), loaded.asynchronous) == (reward, function == "later")
    assert RECORD["extra_info"] == {"index": 7}, "the function has changed the record"


def test_function_for_verl_of_other_data_gets_the_answer(file):
    assert load_reward(f"verl:{file}:plain")(Sample("", "", "2", {"extra_info": None}, "stop")) == Reward(1.0)


def test_function_for_verl_leaves_the_record_as_it_is(file):
    record = RECORD | {"reward_model": {"ground_truth": {"target": ["2"]}}, "extra_info": {"seen": []}}
    reward = load_reward(f"verl:{file}:spoils")
    assert [reward(Sample("", "", SAMPLE.answer, record, "stop")).value for _ in range(2)] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("truth", "answer", "given"), [(2, "2", "2"), (None, None, "None"), ("2", "7", "'7'"), (0.5, "0.5", "0.5")]
)
def test_function_for_verl_gets_the_answer_that_is_configured(file, truth, answer, given):
    """`data.answer_field` may name another field than the ground truth."""
    record = RECORD | {"reward_model": {"ground_truth": truth}}
    assert load_reward(f"verl:{file}:truth")(Sample("", "", answer, record, "stop")).answer == given


@pytest.mark.skipif(not VERL_SCORES.exists(), reason="verl is installed by tools/install/peers.sh")
def test_function_of_verl_itself_scores_gsm8k(monkeypatch):
    """Its file for GSM8K has a function without data_source; the wrapper is what verl's documents show."""
    spec = importlib.util.spec_from_file_location("verl_gsm8k", VERL_SCORES / "gsm8k.py")
    assert spec and spec.loader
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
        return float(theirs.compute_score(solution_str, ground_truth))

    monkeypatch.setitem(sys.modules, "verl_gsm8k", theirs)
    vars(theirs)["wrapped"] = compute_score
    reward = load_reward("verl:verl_gsm8k:wrapped")
    record = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72"}}
    assert [reward(Sample("", text, "72", record, "stop")).value for text in ("#### 72", "#### 71")] == [1.0, 0.0]


@pytest.mark.parametrize("function", ["slime:{slime_file}:batched_rm", "verl:{file}:batch"])
def test_function_of_batches_scores_what_waits(slime_file, file, function):
    samples = [Sample("", "x" * length, "2", {}, "stop") for length in range(40)]
    with AsyncScorer({"": load_reward(function.format(slime_file=slime_file, file=file))}) as scorer:
        assert [reward.value for reward in scorer.score(samples)] == list(range(40))


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        ("slime:missing", {}, "AttributeError: args.rm_url is not set, write it in the reward's options"),
        ("slime:plain", {"reward_key": "x"}, r"mapping without 'x' \(acc, score, pred\). .* by the option reward_key"),
        ("slime:other", {}, r"does not take \(args, sample\). Define it as slime does"),
        ("verl:sample", {}, r"takes no argument 'data_source'. Define it as verl does: compute_score\(data_source, s"),
        ("verl:later", {"scael": 1}, r"unknown option 'scael'. Did you mean 'scale'\? Its options are: scale"),
        ("verl:compute_score", {"a": 1}, "unknown option 'a'. Its options are: none"),
        ("verl:without_score", {}, r"a mapping without 'score' \(acc\). Return a number, or a mapping with 'score'"),
        ("verl:nothing", {}, "returned None. Return a finite number"),
        ("verl:short", {}, "returned 0 results for 1 samples"),
        ("verl:shorts", {}, "returned 0 results for 1 samples"),
        ("verl:columns", {}, r"returned a ndarray of shape \(1, 1\) for 1 samples. Return a list or a flat array"),
        ("verl:items", {}, "returned a generator, .* for 1 samples"),
        ("verl:other", {}, "no function 'other'"),
    ],
)
def test_function_that_does_not_fit_raises(slime_file, file, function, options, reason):
    framework, name = function.split(":")
    path, sample = (slime_file, SLIME_SAMPLE) if framework == "slime" else (file, SAMPLE)
    with pytest.raises(UserError, match=reason):
        load_reward(f"{framework}:{path}:{name}", options)(sample)
