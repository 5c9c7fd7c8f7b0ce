"""Is the final answer right, as mathematics? Judged by the library math-verify."""

import functools
import logging
import multiprocessing
import re
import threading
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from verl_mg.errors import UserError
from verl_mg.rewards.base import Reward, Sample

SECONDS = 5  # the limit for parsing and again for comparing, as math-verify has it by default
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
        A reward with the parts "correct" and "answered" (an answer was found), each 0.0 or 1.0.

    Raises:
        UserError: the record has no answer.
    """
    if sample.answer is None or not sample.answer.strip():
        raise UserError(
            f"rewards.math: no answer for the prompt {sample.prompt[:60]!r}; "
            f"set data.answer_field to one of: {', '.join(sample.record)}"
        )
    if threading.current_thread() is threading.main_thread():
        return _judge(sample.response, sample.answer)
    return _worker().submit(_judge, sample.response, sample.answer).result()


@functools.cache
def _worker() -> ProcessPoolExecutor:
    """A process whose main thread judges for other threads: only there does math-verify's alarm ring."""
    return ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))


def _judge(response: str, answer: str) -> Reward:
    gold = _final(answer) or answer.strip()
    final = _final(response)
    found = _parsed(response) if final is None else _parsed_answer(final)
    correct = (final is not None and _plain(final) == _plain(gold)) or _equal(_parsed_answer(gold), found)
    return Reward(float(correct), {"correct": float(correct), "answered": float(bool(final or found))})


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
