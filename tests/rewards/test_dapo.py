"""DAPO's reward: the last `Answer:` line, compared after the normalisation of Minerva."""

import pytest

from verl_mg.errors import UserError
from verl_mg.rewards import Reward, Sample
from verl_mg.rewards.dapo import normalised, score


def scored(response: str, answer: str | None = "34") -> Reward:
    return score(Sample("p", response, answer, {"a": 1}, "stop"))


@pytest.mark.parametrize(
    "response",
    ["Answer: 34", "so\nanswer : $34$", "Answer: 3\nAnswer: 34", r"Answer: $\boxed{34}$", "Answer: x = 34 \nand so on"],
)
def test_score_right_answer_returns_1(response: str) -> None:
    assert scored(response) == Reward(1.0, {"correct": 1.0, "answered": 1.0}, "34")


@pytest.mark.parametrize("response", ["34", "", "Answer:", "Answer: 34" + " and so on" * 40])
def test_score_without_answer_line_returns_minus_1(response: str) -> None:
    assert scored(response) == Reward(-1.0, {"correct": 0.0, "answered": 0.0})


def test_score_wrong_answer_returns_minus_1() -> None:
    assert scored("Answer: 34\nAnswer: 35") == Reward(-1.0, {"correct": 0.0, "answered": 1.0}, "35")


@pytest.mark.parametrize(
    ("answer", "same"),
    [
        (r"$\frac12$", r"\frac{1}{2}"),
        ("1,234", "1234"),
        (r"\text{ 5 cm }", "5"),
        (r"the value is $x^2$ units", "x^2"),
        (r"90^\circ", "90"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"\textbf{(B)}", "(B)"),
        (r"\overline{AB}", "AB"),
        ("x=5 dollars", "5"),
        (r"an apple", "apple"),
        (r"10,\!000", "10000"),
    ],
)
def test_normalised_equal_answers_give_the_same_text(answer: str, same: str) -> None:
    assert normalised(answer) == same
    assert normalised(same) == same


def test_score_record_without_answer_raises() -> None:
    with pytest.raises(UserError, match="Set data.answer_field to one of: a"):
        scored("Answer: 3", None)
