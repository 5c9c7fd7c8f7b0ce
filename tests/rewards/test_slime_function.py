"""Functions written for slime get its arguments and samples, and what they return becomes a reward."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from verl_mg.errors import UserError
from verl_mg.rewards import AsyncScorer, Reward, Sample, load_reward

RECORD = {"prompt": "1+1=", "label": "2", "metadata": {"rm_type": "math"}}
SAMPLE = Sample("<user>1+1=", " 2\n", "2", RECORD, "length", num_tokens=3)

FUNCTIONS = """\
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
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "own.py"
    path.write_text(FUNCTIONS)
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
def test_function_for_slime_scores_a_sample(file: Path, function: str, options: dict[str, Any], reward: Reward) -> None:
    assert load_reward(f"slime:{file}:{function}", options)(SAMPLE) == reward
    assert RECORD["metadata"] == {"rm_type": "math"}, "the function has changed the record"


def test_function_for_slime_gets_the_label_of_the_record_and_leaves_the_record_as_it_is(file: Path) -> None:
    record = {"prompt": "1+1=", "label": 2, "metadata": {"seen": []}}
    reward = load_reward(f"slime:{file}:spoils")
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
def test_function_for_slime_gets_the_answer_that_is_configured(
    file: Path, record: dict[str, Any], answer: str | None, label: str
) -> None:
    assert load_reward(f"slime:{file}:label")(Sample("", "", answer, record, "stop")).answer == label


def test_function_for_slime_of_batches_scores_what_waits(file: Path) -> None:
    samples = [Sample("", "x" * length, "2", {}, "stop") for length in range(40)]
    with AsyncScorer({"": load_reward(f"slime:{file}:batched_rm")}) as scorer:
        assert [reward.value for reward in scorer.score(samples)] == list(range(40))


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        ("missing", {}, "AttributeError: args.rm_url is not set, write it in the reward's options"),
        ("plain", {"reward_key": "x"}, r"mapping without 'x' \(acc, score, pred\). Name .* by the option reward_key"),
        ("other", {}, r"does not take \(args, sample\). Define it as slime does"),
    ],
)
def test_function_for_slime_that_does_not_fit_raises(
    file: Path, function: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        load_reward(f"slime:{file}:{function}", options)(SAMPLE)


def test_function_for_slime_that_is_installed_gets_samples_of_its_class(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert load_reward(f"slime:{file}:rm", {"rm_url": "http://node7"})(SAMPLE) == Reward(1.0)
