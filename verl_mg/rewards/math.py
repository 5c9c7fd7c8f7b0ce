"""Reward 1.0 for a final answer that is mathematically equal to the record's, compared by the library math-verify."""

import logging
import re
import threading
from fractions import Fraction
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.utils import timeout

from verl_mg.errors import UserError
from verl_mg.rewards.answer_part import (
    LONGEST,
    QUANTITY,
    answer_part,
    marked_lines,
    without_headings,
    without_separators,
)
from verl_mg.rewards.reward import Reward, Sample
from verl_mg.rewards.worker_pool import shared_pool

# Time limit of parsing, and of comparing: the default of math-verify.
SECONDS = 5
DIGITS = 20  # digits to which numbers are compared
# Processes for threads other than the main one; each compares some hundred answers a second.
WORKERS = 4
# Relative difference of numbers that are equal: below 0.1 that of math-verify, 6 decimal digits, is no measure.
TOLERANCE = 1e-5

# A boxed answer takes precedence over any other mathematics in the response.
EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

MATHEMATICS = re.compile(r"\$|\\\(|\\\[|\\boxed|\\begin")

# Its warnings concern comparisons that timed out: these score 0, and there are many.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(sample: Sample) -> Reward:
    r"""Returns 1.0 where the final answer of the response equals the record's, else 0.0; callable from any thread.

    The record's final answer is the text after its last `####`, or the whole answer. The response's, after its
    reasoning, is the text after its last `####` that is no heading and has no `\boxed{}` below, or the answer that
    math-verify extracts: a `\boxed{}`, then other LaTeX, then an expression. Small numbers are equal to 5 digits; "$"
    and thousands separators make no difference; a comparison that exceeds `SECONDS` scores 0.0. The parts "correct"
    and "answered" are 0.0 or 1.0; UserError where the record has no answer.
    """
    if sample.answer is None or not sample.answer.strip():
        raise UserError(
            f"rewards.math: the record of the prompt {sample.prompt[:60]!r} has no answer. "
            f"Set data.answer_field to one of: {', '.join(sample.record)}."
        )
    response = answer_part(sample.response)
    final = _final(response, _gold(sample.answer))
    number = _number(final or "")
    if final and number and without_separators(final) == without_separators(_gold(sample.answer)):
        return Reward(1.0, {"correct": 1.0, "answered": 1.0}, number)  # most answers; no library is needed
    # math-verify limits its time by an alarm signal, which only a main thread gets.
    if threading.current_thread() is threading.main_thread():
        return is_equivalent(response, sample.answer)
    # Two texts are parsed and compared in both directions.
    pool = shared_pool(f"{__name__}:{is_equivalent.__name__}", WORKERS, seconds=4 * SECONDS + 1)
    reward = pool.score(response, sample.answer)
    return reward or Reward(0.0, {"correct": 0.0, "answered": float(bool(final))})


def is_equivalent(response: str, answer: str) -> Reward:
    """Computes the reward of `score` in this thread, which must be a main thread: math-verify uses alarm signals."""
    gold = _gold(answer)
    final = _final(response, gold)
    parsed = _parsed(without_headings(response)) if final is None else _parsed_answer(final)
    correct = final is not None and without_separators(final) == without_separators(gold)
    if not correct:
        expected = _parsed_answer(gold)
        correct = bool(verify(expected, parsed, timeout_seconds=SECONDS)) and _are_close(expected, parsed)
    parts = {"correct": float(correct), "answered": float(bool(final or parsed))}
    return Reward(float(correct), parts, _number(final or "") or _canonical(parsed) or final or None)


def _gold(answer: str) -> str:
    return _final(answer) or answer.strip()


def _final(text: str, gold: str = "") -> str | None:
    """Returns the line after the last mark that is an answer; None without one. `gold` is no heading."""
    for number, marked in enumerate(marked_lines(text)):
        if marked.has_box_below:
            return None
        if not marked.is_heading or (number == 0 and without_separators(marked.line) == without_separators(gold)):
            return marked.line
    return None


def _are_close(expected: list[Any], parsed: list[Any]) -> bool:
    """Returns whether the numbers of two equal answers differ by no more than `TOLERANCE`, relative to the larger."""
    try:
        return timeout(SECONDS)(_numbers_are_close)(expected[0], parsed[0])
    except Exception:  # the time is up, or sympy has no value
        return False


def _numbers_are_close(expected: Any, parsed: Any) -> bool:
    pairs = list(zip(_numbers(expected), _numbers(parsed), strict=False))
    return all(
        abs(left - right) <= TOLERANCE * max(abs(left), abs(right)) or bool(expected.equals(parsed))
        for left, right in pairs
        if max(abs(left), abs(right)) < 0.1
    )


def _numbers(expression: Any) -> list[Any]:
    """Returns the values of a number, or of the numbers of a tuple, a set, an interval, a matrix or an equation."""
    is_equation = isinstance(expression, sympy.Eq) and expression.lhs.is_Symbol
    if is_equation or isinstance(expression, sympy.MatrixBase | sympy.Tuple | sympy.Set):
        return sorted((number for part in expression.args for number in _numbers(part)), key=str)
    if isinstance(expression, sympy.Expr) and expression.is_number:
        return [expression.doit().evalf(DIGITS)]
    return []


def _parsed_answer(text: str) -> list[Any]:
    """Parses a text that is an answer and nothing else."""
    quantity = _quantity(text)
    if quantity:
        return _parsed(quantity[1])
    if MATHEMATICS.search(text) or len(text) > LONGEST:
        return _parsed(text)
    # Without LaTeX delimiters math-verify would see no more than the numbers in "x+1" or "2^{10}".
    return _parsed(f"\\boxed{{{text}}}")


def _quantity(text: str) -> re.Match[str] | None:
    # A pattern with several repetitions is for short texts: its time grows with the square of the length.
    return QUANTITY.fullmatch(without_separators(text)) if len(text) <= LONGEST else None


def _number(text: str) -> str | None:
    """Returns a plain number in lowest terms, "1/2" for "0.50"; None for any other text."""
    quantity = _quantity(text)
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


def _parsed(text: str) -> list[Any]:
    expressions: list[Any] = parse(text, EXTRACTION, parsing_timeout=SECONDS)
    return expressions
