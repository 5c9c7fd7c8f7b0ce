"""Numbers behind `####`, or the last one."""

import json
from pathlib import Path
from typing import Any

import pytest

from verl_mg.errors import UserError
from verl_mg.rewards import Reward, Sample, load_reward


def score(response: str, answer: str | None = "so\n#### 1,234", **options: Any) -> Reward:
    return load_reward("verl_mg.rewards.gsm8k:score", options)(Sample("p", response, answer, {"a": 1}, "stop"))


@pytest.mark.parametrize(
    ("response", "answer"),
    [("#### 1234", "1234"), ("#### 7\n#### $1,234.00.", "1234"), ("####1,234 dollars", "1234"), ("#### - 5", "-5")],
)
def test_strict(response: str, answer: str) -> None:
    right = float(answer == "1234")
    assert score(response) == Reward(right, {"correct": right, "answered": 1.0}, answer)


@pytest.mark.parametrize("response", ["", "1234", "#### none", "the answer is 1234", "#### .", "#### 1.2.3"])
def test_strict_finds_nothing(response: str) -> None:
    assert score(response, missing=-0.5) == Reward(-0.5, {"correct": 0.0, "answered": 0.0})


@pytest.mark.parametrize(
    ("response", "answer"),
    [("It is 7, no, 1,234.", "1234"), ("1234", "1234"), ("costs $1234.0", "1234"), ("3 or 0.50", "0.5"), (".5", "0.5")],
)
def test_flexible(response: str, answer: str) -> None:
    reward = score(response, method="flexible")
    assert (reward.answer, reward.value) == (answer, float(answer == "1234"))


def test_flexible_finds_nothing() -> None:
    assert score("no number, really.", method="flexible").parts["answered"] == 0.0


def test_values() -> None:
    values: dict[str, Any] = {"correct": 2.0, "wrong": 0.1, "missing": -1.0}
    assert [score(text, **values).value for text in ("#### 1234", "#### 1", "1")] == [2.0, 0.1, -1.0]


def test_bad_input() -> None:
    with pytest.raises(UserError, match="the answer None is no number; set data.answer_field to one of: a"):
        score("#### 1", answer=None)
    with pytest.raises(UserError, match="method is 'lax'; write strict or flexible"):
        score("#### 1", method="lax")


def test_the_real_one(gsm8k: Path) -> None:
    for line in (gsm8k / "test.jsonl").read_text(encoding="utf-8").splitlines()[:300]:
        answer = json.loads(line)["answer"]
        assert score(answer, answer).value == 1.0
        assert score(answer, answer, method="flexible").value == 1.0
        assert score(answer + "1", answer).value == 0.0
