"""GSM8K's reward: the number after `####`, or the last number."""

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
def test_score_strict_reads_the_number_after_the_last_mark(response: str, answer: str) -> None:
    right = float(answer == "1234")
    assert score(response) == Reward(right, {"correct": right, "answered": 1.0}, answer)


@pytest.mark.parametrize("response", ["", "1234", "#### none", "the answer is 1234", "#### .", "#### 1.2.3"])
def test_score_strict_without_marked_number_returns_missing(response: str) -> None:
    assert score(response, missing=-0.5) == Reward(-0.5, {"correct": 0.0, "answered": 0.0})


@pytest.mark.parametrize(
    ("response", "answer"),
    [("It is 7, no, 1,234.", "1234"), ("1234", "1234"), ("costs $1234.0", "1234"), ("3 or 0.50", "0.5"), (".5", "0.5")],
)
def test_score_flexible_reads_the_last_number(response: str, answer: str) -> None:
    reward = score(response, method="flexible")
    assert (reward.answer, reward.value) == (answer, float(answer == "1234"))


def test_score_flexible_without_number_is_not_answered() -> None:
    assert score("no number, really.", method="flexible").parts["answered"] == 0.0


def test_score_options_set_the_rewards() -> None:
    values: dict[str, Any] = {"correct": 2.0, "wrong": 0.1, "missing": -1.0}
    assert [score(text, **values).value for text in ("#### 1234", "#### 1", "1")] == [2.0, 0.1, -1.0]


def test_score_invalid_record_or_method_raises() -> None:
    with pytest.raises(UserError, match="the answer None is not a number. Set data.answer_field to one of: a"):
        score("#### 1", answer=None)
    with pytest.raises(UserError, match="method 'lax' is unknown. Write strict or flexible"):
        score("#### 1", method="lax")


def test_score_real_gsm8k_answers_score_1(gsm8k: Path) -> None:
    for line in (gsm8k / "test.jsonl").read_text(encoding="utf-8").splitlines()[:300]:
        answer = json.loads(line)["answer"]
        assert score(answer, answer).value == 1.0
        assert score(answer, answer, method="flexible").value == 1.0
        assert score(answer + "1", answer).value == 0.0
