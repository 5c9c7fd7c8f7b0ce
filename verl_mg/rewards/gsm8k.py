"""Reward for the answer format of GSM8K, `#### 42`, compared as a number [arXiv:2110.14168]."""

import re
from decimal import Context, Decimal, InvalidOperation
from typing import Literal

from verl_mg.errors import UserError
from verl_mg.rewards.answer_part import answer_part, marked_lines
from verl_mg.rewards.reward import Reward, Sample

FIRST = re.compile(r"\$?\s?(-?\s?\$?[0-9.,]*[0-9])")
NUMBERING = re.compile(r"[.):]\s*\S")  # after the number of a heading: "#### 1. Add"
NUMBER = re.compile(r"-?\$?[0-9][0-9.,]*|-?\$?\.[0-9]+")


def score(
    sample: Sample,
    method: Literal["strict", "flexible"] = "strict",
    correct: float = 1.0,
    wrong: float = 0.0,
    missing: float = 0.0,
) -> Reward:
    """Scores the number that the response gives as its answer; the parts "correct" and "answered" are 0.0 or 1.0.

    Args:
        sample: its answer is a number, or text that ends with `#### NUMBER`; UserError otherwise.
        method: "strict" reads the number after the last `####` of the response that is no heading, "flexible" its
            last number; both after the reasoning.
        correct: reward of the right number, compared by value: 1,000 and $1000.00 are equal.
        wrong: reward of another number; a value slightly above `missing` rewards the format.
        missing: reward of a response without a number in this format.
    """
    if method not in ("strict", "flexible"):
        raise UserError(f"rewards.gsm8k: method {method!r} is unknown. Write strict or flexible.")
    gold = _number((sample.answer or "").rpartition("####")[2])
    if gold is None:
        raise UserError(
            f"rewards.gsm8k: the answer {sample.answer!r:.60} is not a number. "
            f"Set data.answer_field to one of: {', '.join(sample.record)}."
        )
    response = answer_part(sample.response)
    text = _marked_number(response) if method == "strict" else (NUMBER.findall(response) or [None])[-1]
    number = None if text is None else _number(text)
    if number is None:
        return Reward(missing, {"correct": 0.0, "answered": 0.0})
    right = number == gold
    return Reward(correct if right else wrong, {"correct": float(right), "answered": 1.0}, f"{number:f}")


def _marked_number(response: str) -> str | None:
    for marked in marked_lines(response):
        match = FIRST.match(marked.line)
        if match and not (marked.has_text_below and NUMBERING.match(marked.line, match.end())):
            return match[1]
    return None


def _number(text: str) -> Decimal | None:
    digits = re.sub(r"[\s,$]", "", text).rstrip(".")
    try:
        # Without trailing zeros, so that equal numbers are equal texts; with all others, also of long numbers.
        number = Decimal(digits).normalize(Context(prec=len(digits) + 1))
    except InvalidOperation:
        return None
    return number.copy_abs() if number.is_zero() else number
