"""Reward for the letter of a multiple-choice question, as in GPQA [arXiv:2311.12022]."""

import re
import string

from verl_mg.errors import UserError
from verl_mg.rewards.answer_part import answer_part
from verl_mg.rewards.reward import Reward, Sample

# Repetitions are possessive (*+): none gives back what the next one may take, so the time is linear.
_LETTER = r"[*_$\s({\[]*+(?:\\(?:text|mathrm|textbf|mathbf)\s*+\{\s*+)?\(?([A-Z])\b(?!')"
BOXED = re.compile(r"\\boxed\s*+\{" + _LETTER)
STATED = re.compile(r"(?i:\banswers?\b[*_]*+(?:\s++(?:choice|option))?\s*+(?:is|:|=)[*_]*+:?(?:\s++option)?)" + _LETTER)
ALONE = re.compile(r"[*_$\s(\[]*+([A-Z])[)\].:*_$\s]*+")


def score(sample: Sample, choices: int = 4) -> Reward:
    r"""Returns 1.0 where the letter that the response gives is the answer of the record, else 0.0.

    The letter is the last one in `\boxed{}`; without any, the last one that is stated as "Answer: C", "the answer
    is (C)", "the correct option is" with the word answer, in bold or not; otherwise the last line if it is only a
    letter, as "C", "(C)" or "**C.**". Letters are capitals. Reasoning does not count. The parts
    "correct" and "answered" are 0.0 or 1.0.

    Args:
        sample: its answer is a letter; UserError otherwise.
        choices: number of choices: 4 are A to D.
    """
    letters = string.ascii_uppercase[:choices]
    gold = (sample.answer or "").strip().strip("()").upper()
    if len(gold) != 1 or gold not in letters:
        raise UserError(
            f"rewards.choice: the answer {sample.answer!r:.40} is not one of the letters {letters}. Set "
            "data.answer_field to the letter's field, or data.prepare to a function that writes it."
        )
    letter = letter_of(sample.response, letters)
    if letter is None:
        return Reward(0.0, {"correct": 0.0, "answered": 0.0})
    right = float(letter == gold)
    return Reward(right, {"correct": right, "answered": 1.0}, letter)


def letter_of(response: str, letters: str) -> str | None:
    """Returns the letter that a response gives as its answer; None without one.

    Args:
        response, letters: text of the response, and the letters of the choices.
    """
    text = answer_part(response).strip()
    for pattern in (BOXED, STATED):
        if given := [letter for letter in pattern.findall(text) if letter in letters]:
            return str(given[-1])
    last = ALONE.fullmatch(text.splitlines()[-1]) if text else None
    return last[1] if last and last[1] in letters else None
