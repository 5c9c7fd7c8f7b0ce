"""Reward for the answer format of GSM8K, `#### 42`, compared as a number [arXiv:2110.14168]."""

import re
from decimal import Decimal, InvalidOperation
from typing import Literal

from verl_mg.errors import UserError
from verl_mg.rewards.reward import Reward, Sample

MARKED = re.compile(r"####\s*\$?\s*(-?\s?\$?[0-9.,]*[0-9])")
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
        method: "strict" reads the number after the last `####` of the response, "flexible" its last number.
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
    matches = (MARKED if method == "strict" else NUMBER).findall(sample.response)
    number = _number(matches[-1]) if matches else None
    if number is None:
        return Reward(missing, {"correct": 0.0, "answered": 0.0})
    right = number == gold
    return Reward(correct if right else wrong, {"correct": float(right), "answered": 1.0}, f"{number:f}")


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(re.sub(r"[\s,$]", "", text).rstrip("."))
    except InvalidOperation:
        return None
    # Without trailing zeros, so that equal numbers are equal texts.
    return number.normalize() + 0 if number.is_finite() else None
