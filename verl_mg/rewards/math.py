"""Reward 1.0 for a final answer that is mathematically equal to the record's, compared by the library math-verify."""

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
from verl_mg.rewards.math_pool import MathPool
from verl_mg.rewards.reward import Reward, Sample

# Time limit of parsing, and of comparing: the default of math-verify.
SECONDS = 5
# Processes for threads other than the main one; each compares some hundred answers a second.
WORKERS = 4
MARK = "####"  # the marker of a final answer in GSM8K
# Characters; prose that is parsed as a formula with a symbol per letter takes seconds.
LONGEST_FORMULA = 200

# A boxed answer takes precedence over any other mathematics in the response.
EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

# "72", "1234.50", "-3/4", "18%", "72 clips", "The answer is 5."
QUANTITY = re.compile(r"(?:[A-Za-z' ]+[: ])?\s*(-?\s?\d*\.?\d+(?:/\d+)?%?)(?:\s[A-Za-z ]*)?\.?")
MATHEMATICS = re.compile(r"\$|\\\(|\\\[|\\boxed|\\begin")

# Its warnings concern comparisons that timed out: these score 0, and there are many.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(sample: Sample) -> Reward:
    r"""Returns 1.0 where the final answer of the response equals the record's, else 0.0; callable from any thread.

    The record's final answer is the text after its last `####`, or the whole answer. The response's is the text
    after its last `####`, or the answer that math-verify extracts: a `\boxed{}`, then other LaTeX, then an expression.
    "$" and thousands separators make no difference; a comparison that exceeds `SECONDS` scores 0.0. The parts "correct"
    and "answered" are 0.0 or 1.0; UserError where the record has no answer.
    """
    if sample.answer is None or not sample.answer.strip():
        raise UserError(
            f"rewards.math: the record of the prompt {sample.prompt[:60]!r} has no answer. "
            f"Set data.answer_field to one of: {', '.join(sample.record)}."
        )
    final = _final(sample.response)
    number = _number(final or "")
    if final and number and _plain(final) == _plain(_gold(sample.answer)):
        return Reward(1.0, {"correct": 1.0, "answered": 1.0}, number)  # most answers; no library is needed
    # math-verify limits its time by an alarm signal, which only a main thread gets.
    if threading.current_thread() is threading.main_thread():
        return is_equivalent(sample.response, sample.answer)
    reward = _pool(os.getpid()).score(sample.response, sample.answer)
    return reward or Reward(0.0, {"correct": 0.0, "answered": float(bool(final))})


def is_equivalent(response: str, answer: str) -> Reward:
    """Computes the reward of `score` in this thread, which must be a main thread: math-verify uses alarm signals."""
    final = _final(response)
    parsed = _parsed(response) if final is None else _parsed_answer(final)
    gold = _gold(answer)
    same_text = final is not None and _plain(final) == _plain(gold)
    correct = same_text or bool(verify(_parsed_answer(gold), parsed, timeout_seconds=SECONDS))
    parts = {"correct": float(correct), "answered": float(bool(final or parsed))}
    return Reward(float(correct), parts, _number(final or "") or _canonical(parsed) or final or None)


@functools.cache
def _pool(pid: int) -> MathPool:
    """Returns the pool of the process `pid`: a forked process must not use its parent's."""
    # Two texts are parsed and compared in both directions.
    pool = MathPool(WORKERS, seconds=4 * SECONDS + 1)
    atexit.register(pool.close)
    return pool


def _gold(answer: str) -> str:
    return _final(answer) or answer.strip()


def _final(text: str) -> str | None:
    """Returns the first non-empty line after the last mark; None without a mark."""
    _, mark, rest = text.rpartition(MARK)
    return (rest.strip().splitlines() or [""])[0].strip() if mark else None


def _parsed_answer(text: str) -> list[Any]:
    """Parses a text that is an answer and nothing else."""
    quantity = QUANTITY.fullmatch(_plain(text))
    if quantity:
        return _parsed(quantity[1])
    if MATHEMATICS.search(text) or len(text) > LONGEST_FORMULA:
        return _parsed(text)
    # Without LaTeX delimiters math-verify would see no more than the numbers in "x+1" or "2^{10}".
    return _parsed(f"\\boxed{{{text}}}")


def _number(text: str) -> str | None:
    """Returns a plain number in lowest terms, "1/2" for "0.50"; None for any other text."""
    quantity = QUANTITY.fullmatch(_plain(text))
    if not quantity or "%" in quantity[1]:
        return None
    numerator, _, denominator = re.sub(r"\s", "", quantity[1]).partition("/")
    try:
        return str(Fraction(numerator) / Fraction(denominator or "1"))
    except (ValueError, ZeroDivisionError):
        return None


def _canonical(parsed: list[Any]) -> str | None:
    """Formats a parsed answer, so that the most common ways to write an answer give the same text."""
    if not parsed:
        return None
    first = parsed[0]
    if isinstance(first, sympy.Mul) and "/" in str(parsed[-1]) and (number := _number(str(parsed[-1]))):
        return number
    try:
        return str(Fraction(str(first)) if isinstance(first, sympy.Float) else first)
    except ValueError:  # more digits than Python turns into text
        return str(parsed[-1])


def _plain(text: str) -> str:
    """Removes the dollar sign of a price and thousands separators."""
    if text.count("$") == 1:
        text = text.replace("\\$", "").replace("$", "")
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).strip()


def _parsed(text: str) -> list[Any]:
    expressions: list[Any] = parse(text, EXTRACTION, parsing_timeout=SECONDS)
    return expressions
