"""Is the final answer right, as mathematics? Judged by the library math-verify."""

import atexit
import functools
import logging
import os
import re
import threading
from fractions import Fraction
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from verl_mg.errors import UserError
from verl_mg.rewards.base import Reward, Sample
from verl_mg.rewards.math_pool import MathPool

SECONDS = 5  # the limit for parsing and again for comparing, as math-verify has it by default
WORKERS = 4  # processes for threads other than the main one; one judges some hundred answers a second
MARK = "####"  # what GSM8K writes before a final answer

LONGEST_FORMULA = 200  # characters; prose read as a formula, a symbol a letter, takes seconds

# A boxed answer counts before any other mathematics in the response.
EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

# "72", "1234.50", "-3/4", "18%", "72 clips", "The answer is 5."
QUANTITY = re.compile(r"(?:[A-Za-z' ]+[: ])?\s*(-?\s?\d*\.?\d+(?:/\d+)?%?)(?:\s[A-Za-z ]*)?\.?")
MATHEMATICS = re.compile(r"\$|\\\(|\\\[|\\boxed|\\begin")

# Its warnings are of answers that it gave up in time: those score 0, and there are many.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(sample: Sample) -> Reward:
    """1.0 where the final answer of the response equals that of the record, else 0.0.

    The record's is the text after its last `####`, or the whole answer. The response's is what follows its
    last `####`, or what math-verify finds in it: a `\\boxed{}`, then other LaTeX, then an expression.
    "$" and thousands separators make no difference; what takes over `SECONDS` scores 0.0. Callable from any
    thread.

    Returns:
        A reward with the parts "correct" and "answered" (an answer was found), each 0.0 or 1.0, and the answer.

    Raises:
        UserError: the record has no answer.
    """
    if sample.answer is None or not sample.answer.strip():
        raise UserError(
            f"rewards.math: no answer for the prompt {sample.prompt[:60]!r}; "
            f"set data.answer_field to one of: {', '.join(sample.record)}"
        )
    final = _final(sample.response)
    number = _number(final or "")
    if final and number and _plain(final) == _plain(_gold(sample.answer)):
        return Reward(1.0, {"correct": 1.0, "answered": 1.0}, number)  # most answers; they need no library
    if threading.current_thread() is threading.main_thread():
        return is_equivalent(sample.response, sample.answer)
    judged = _workers(os.getpid()).judge(sample.response, sample.answer)
    return judged or Reward(0.0, {"correct": 0.0, "answered": float(bool(final))})


def is_equivalent(response: str, answer: str) -> Reward:
    """`score` in a main thread, of a response and the record's answer."""
    final = _final(response)
    found = _parsed(response) if final is None else _parsed_answer(final)
    gold = _gold(answer)
    correct = (final is not None and _plain(final) == _plain(gold)) or _equal(_parsed_answer(gold), found)
    parts = {"correct": float(correct), "answered": float(bool(final or found))}
    return Reward(float(correct), parts, _number(final or "") or _canonical(found) or final or None)


@functools.cache
def _workers(process: int) -> MathPool:
    """Those of this process: a forked one has none of its parent's."""
    # Parsing two texts, comparing both ways.
    workers = MathPool(WORKERS, seconds=4 * SECONDS + 1)
    atexit.register(workers.close)
    return workers


def _gold(answer: str) -> str:
    return _final(answer) or answer.strip()


def _final(text: str) -> str | None:
    """The first line with text after the last mark; None without a mark."""
    _, mark, rest = text.rpartition(MARK)
    return (rest.strip().splitlines() or [""])[0].strip() if mark else None


def _parsed_answer(text: str) -> list[Any]:
    """What math-verify reads in a text that is an answer and nothing else."""
    quantity = QUANTITY.fullmatch(_plain(text))
    if quantity:
        return _parsed(quantity[1])
    if MATHEMATICS.search(text) or len(text) > LONGEST_FORMULA:
        return _parsed(text)
    # Without LaTeX delimiters math-verify would see no more than the numbers in "x+1" or "2^{10}".
    return _parsed(f"\\boxed{{{text}}}")


def _number(text: str) -> str | None:
    """A plain number in lowest terms, as text: "1/2" for "0.50"; None for anything else."""
    quantity = QUANTITY.fullmatch(_plain(text))
    if not quantity or "%" in quantity[1]:
        return None
    above, _, below = re.sub(r"\s", "", quantity[1]).partition("/")
    try:
        return str(Fraction(above) / Fraction(below or "1"))
    except (ValueError, ZeroDivisionError):
        return None


def _canonical(found: list[Any]) -> str | None:
    """One text for what math-verify has found, the same for the commonest ways to write the same."""
    if not found:
        return None
    first = found[0]
    if isinstance(first, sympy.Mul) and "/" in str(found[-1]) and (number := _number(str(found[-1]))):
        return number
    try:
        return str(Fraction(str(first)) if isinstance(first, sympy.Float) else first)
    except ValueError:  # more digits than Python turns into text
        return str(found[-1])


def _plain(text: str) -> str:
    """Without the dollar of a price and without thousands separators."""
    if text.count("$") == 1:
        text = text.replace("\\$", "").replace("$", "")
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).strip()


def _parsed(text: str) -> list[Any]:
    found: list[Any] = parse(text, EXTRACTION, parsing_timeout=SECONDS)
    return found


def _equal(gold: list[Any], found: list[Any]) -> bool:
    return bool(verify(gold, found, timeout_seconds=SECONDS))
