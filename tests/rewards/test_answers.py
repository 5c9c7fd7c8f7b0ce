"""Rewards that compare the answer in a response, or its format."""

import json
import re
from typing import Any

import pytest

from verl_mg.errors import UserError
from verl_mg.rewards import Reward, Sample, choice, dapo, exact, load_reward
from verl_mg.rewards.regex_format import RegexFormat


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [(" yes\n", "yes ", 1.0), ("Yes", "yes", 0.0), ("y es", "yes", 0.0), ("", None, 0.0), ("1.0", "1", 0.0)],
)
def test_exact_score_compares_characters_without_surrounding_space(response, answer, value):
    assert exact.score(Sample("p", response, answer, {}, "stop")).value == value


WRITTEN = {
    "Answer: C": "C",
    "Some reasoning.\nAnswer: $C$": "C",
    "**Answer:** C": "C",
    "**Answer: C**": "C",
    "The correct answer is (C).": "C",
    "So the final answer is **C**, as A has the wrong sign.": "C",
    "The answer is option C": "C",
    "answer choice is C) 3 mol": "C",
    "the answer is \\(\\text{C}\\)": None,
    "\\boxed{C}": "C",
    "\\boxed{\\text{(C)}}": "C",
    "\\boxed{\\textbf{C}} and Answer: A": "C",
    "First I thought the answer is A. Then: the answer is B.": "B",
    "(C)": "C",
    "I compare them.\n\n**C.**": "C",
    "A is wrong because of B.": None,
    "The answer is A's neighbour": None,
    "The answer is Anthracene": None,
    "answer: c": None,
    "The answer is E": None,
    "": None,
    "<think>The answer is A</think>The answer is D": "D",
    "<think>The answer is A</think>I do not know.": None,
    "<think>The answer is A, or": None,
    "[THINK]The answer is A[/THINK]The answer is D": "D",
    "[THINK]The answer is A, or": None,
    "<|channel|>analysis<|message|>The answer is A, or": None,
    "<|channel|>analysis<|message|>A is wrong<|end|><|start|>assistant<|channel|>final<|message|>Answer: D": "D",
    "\n◁think▷The answer is A, or": None,
}


@pytest.mark.parametrize("response", WRITTEN)
def test_letter_of_common_forms_is_read(response):
    assert choice.letter_of(response, "ABCD") == WRITTEN[response]


def test_choice_score_compares_letters_and_counts_answers():
    def of(response: str, answer: str | None, **options: int):
        return choice.score(Sample("?", response, answer, {}, "stop"), **options)

    right, wrong, none = of("Answer: B", "B"), of("Answer: B", "(c)"), of("Hm.", "B")
    assert (right.value, right.answer, right.parts) == (1.0, "B", {"correct": 1.0, "answered": 1.0})
    assert (wrong.value, wrong.answer, wrong.parts["answered"]) == (0.0, "B", 1.0)
    assert (none.value, none.answer, none.parts["answered"]) == (0.0, None, 0.0)
    assert of("Answer: J", "J", choices=10).value == 1.0
    with pytest.raises(UserError, match="the answer 'E' is not one of the letters ABCD"):
        of("Answer: E", "E")


def dapo_score(response: str, answer: str | None = "34") -> Reward:
    return dapo.score(Sample("p", response, answer, {"a": 1}, "stop"))


@pytest.mark.parametrize(
    "response",
    ["Answer: 34", "so\nanswer : $34$", "Answer: 3\nAnswer: 34", r"Answer: $\boxed{34}$", "Answer: x = 34 \nand so on"],
)
def test_dapo_score_right_answer_returns_1(response):
    assert dapo_score(response) == Reward(1.0, {"correct": 1.0, "answered": 1.0}, "34")


@pytest.mark.parametrize("response", ["34", "", "Answer:", "Answer: 34" + " and so on" * 40])
def test_dapo_score_without_answer_line_returns_minus_1(response):
    assert dapo_score(response) == Reward(-1.0, {"correct": 0.0, "answered": 0.0})


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
def test_normalised_equal_answers_give_the_same_text(answer, same):
    assert dapo.normalised(answer) == same
    assert dapo.normalised(same) == same


def test_dapo_score_wrong_answer_returns_minus_1_and_none_raises():
    assert dapo_score("Answer: 34\nAnswer: 35") == Reward(-1.0, {"correct": 0.0, "answered": 1.0}, "35")
    with pytest.raises(UserError, match="Set data.answer_field to one of: a"):
        dapo_score("Answer: 3", None)


def gsm8k_score(response: str, answer: str | None = "so\n#### 1,234", **options: Any) -> Reward:
    return load_reward("verl_mg.rewards.gsm8k:score", options)(Sample("p", response, answer, {"a": 1}, "stop"))


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("#### 1234", "1234"),
        ("#### 7\n#### $1,234.00.", "1234"),
        ("####1,234 dollars", "1234"),
        ("#### - 5", "-5"),
        ("#### 1234\n\n#### 2. Check\nIt is.", "1234"),
        ("#### 1) Add\n#### 1234. That is all", "1234"),
        ("<think>#### 7</think>#### 1234", "1234"),
    ],
)
def test_gsm8k_score_strict_reads_the_number_after_the_last_mark(response, answer):
    right = float(answer == "1234")
    assert gsm8k_score(response) == Reward(right, {"correct": right, "answered": 1.0}, answer)


@pytest.mark.parametrize("response", ["", "1234", "#### none", "the answer is 1234", "#### .", "#### 1.2.3"])
def test_gsm8k_score_without_number_in_the_format_returns_missing(response):
    missing = Reward(-0.5, {"correct": 0.0, "answered": 0.0})
    assert gsm8k_score(response, missing=-0.5) == missing
    assert gsm8k_score(re.sub(r"\d", "", response), missing=-0.5, method="flexible") == missing


@pytest.mark.parametrize(
    ("response", "answer"),
    [("It is 7, no, 1,234.", "1234"), ("1234", "1234"), ("costs $1234.0", "1234"), ("3 or 0.50", "0.5"), (".5", "0.5")],
)
def test_gsm8k_score_flexible_reads_the_last_number(response, answer):
    reward = gsm8k_score(response, method="flexible")
    assert (reward.answer, reward.value) == (answer, float(answer == "1234"))


def test_gsm8k_score_options_set_the_rewards():
    values: dict[str, Any] = {"correct": 2.0, "wrong": 0.1, "missing": -1.0}
    assert [gsm8k_score(text, **values).value for text in ("#### 1234", "#### 1", "1")] == [2.0, 0.1, -1.0]


def test_gsm8k_score_invalid_record_or_method_raises():
    with pytest.raises(UserError, match="the answer None is not a number. Set data.answer_field to one of: a"):
        gsm8k_score("#### 1", answer=None)
    with pytest.raises(UserError, match="method 'lax' is unknown. Write strict or flexible"):
        gsm8k_score("#### 1", method="lax")


def test_gsm8k_score_of_real_answers_is_1(gsm8k):
    for line in (gsm8k / "test.jsonl").read_text(encoding="utf-8").splitlines()[:300]:
        answer = json.loads(line)["answer"]
        assert gsm8k_score(answer, answer).value == 1.0
        assert gsm8k_score(answer, answer, method="flexible").value == 1.0
        assert gsm8k_score(answer + "1", answer).value == 0.0


def test_gsm8k_score_long_numbers_are_equal_in_every_digit():
    digits = "1" * 40
    assert gsm8k_score(f"#### {digits}", digits).value == 1.0
    assert gsm8k_score(f"#### {digits[:-1]}2", digits).value == 0.0
    assert gsm8k_score("#### -0.0", "0").value == 1.0


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a</think><think>b</think><answer>c</answer></answer>", 1.0),
        ("<think>a</think><answer>b</answer>c", 0.0),
        ("<think>a\nb</think>\n<answer>4</answer>\n", 1.0),
        ("<think>a</think> and <answer>4</answer>", 0.0),
        ("<answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_score_default_pattern_requires_thinking_before_answering(response, value):
    assert RegexFormat().score(Sample("p", response, None, {}, "stop")) == Reward(value, {"form": value})


def test_regex_format_options_set_pattern_and_rewards():
    reward = load_reward("verl_mg.rewards.regex_format:RegexFormat", {"pattern": "[a-z]+", "hit": 0.5, "miss": -0.5})
    assert [reward(Sample("p", text, None, {}, "stop")).value for text in ("abc", "abc1")] == [0.5, -0.5]
    with pytest.raises(UserError, match=r"pattern: '\(' is not a regular expression"):
        load_reward("verl_mg.rewards.regex_format:RegexFormat", {"pattern": "("})


def test_regex_format_pattern_without_end_misses():
    reward = load_reward("verl_mg.rewards.regex_format:RegexFormat", {"pattern": "(a|aa)+b", "miss": -1.0})
    assert reward(Sample("p", "a" * 60, None, {}, "stop")).value == -1.0
