"""A score takes linear time in the length of the response: a pattern holds Python's lock, and a rank's threads wait."""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace

import pytest

from verl_mg.rewards import Sample, math, regex_format
from verl_mg.rewards.choice import letter_of
from verl_mg.rewards.code import last_program
from verl_mg.rewards.dapo import score as dapo
from verl_mg.rewards.exact import score as exact
from verl_mg.rewards.gsm8k import score as gsm8k
from verl_mg.rewards.reasoning_gym import Score
from verl_mg.rewards.regex_format import RegexFormat

SECONDS = 1.0  # of the processor; the square of LENGTH takes several, a linear pattern milliseconds
LENGTH = 20_000
BEGINS = ("", "#### ", "answer: ", "\\boxed{", "<think>", "<think></think><answer>", "```python\n")
REPEATED = (
    " ", "\n", "*", "_", "(", "[", "{", "$", "-", "1", ",", "1,", ".", "a", "a ", "`", "#", "####", "#### 1\n",
    "#### a\nb\n", "\\boxed{", "\\boxed", "\\text{", "answer is ", "answer", "Answer: C ", "A's ", "<think>",
    "</think>", "<answer>", "</answer>", "</think><answer>", "</think> <answer></answer>", "```", "```\n",
)  # fmt: skip


def sample(response: str) -> Sample:
    return Sample("p", response, "42", {}, "length")


SCORES: dict[str, Callable[[str], object]] = {
    "choice": lambda response: letter_of(response, "ABCD"),
    "code": last_program,
    "dapo": lambda response: dapo(sample(response)),
    "exact": lambda response: exact(sample(response)),
    "gsm8k": lambda response: gsm8k(sample(response)),
    "gsm8k flexible": lambda response: gsm8k(sample(response), method="flexible"),
    "math": lambda response: math.score(sample(response)),
    "reasoning_gym": Score()._answer,
    "regex_format": lambda response: RegexFormat().score(sample(response)),
}


def responses(length: int) -> Iterator[str]:
    for begin, unit in product(BEGINS, REPEATED):
        yield begin + unit * (length // len(unit)) + "x;"


def seconds(score: Callable[[str], object], response: str) -> float:
    start = time.thread_time()
    score(response)
    return time.thread_time() - start


@pytest.mark.parametrize("name", SCORES)
def test_score_of_repetitions_takes_little_time(monkeypatch, name):
    # What math-verify computes is in processes that are killed when their time is up.
    pool = SimpleNamespace(score=lambda response, answer: None)
    monkeypatch.setattr(math, "shared_pool", lambda *limits, **seconds: pool)
    monkeypatch.setattr(regex_format, "SECONDS", 60.0)  # so that the bound of this test decides, not the time limit
    times: dict[str, float] = {}

    def run() -> None:  # not in the main thread, in which math-verify would be called
        times.update({response[:40]: seconds(SCORES[name], response) for response in responses(LENGTH)})

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    slowest = max(times, key=lambda text: times[text])
    assert times[slowest] < SECONDS, f"{slowest!r}: {times[slowest]:.1f} s for {LENGTH} characters"
    assert len(times) > len(REPEATED)


@pytest.mark.nightly
def test_score_of_a_response_four_times_as_long_takes_about_four_times_as_long(monkeypatch):
    monkeypatch.setattr(regex_format, "SECONDS", 60.0)
    for name, score in SCORES.items():
        if name == "math":  # it has processes
            continue
        for short, long in zip(responses(50_000), responses(200_000), strict=True):
            before, after = (min(seconds(score, text) for _ in range(3)) for text in (short, long))
            assert after < 10 * before + 0.02, f"{name}, {short[:40]!r}: {before:.3f} s and {after:.3f} s"
