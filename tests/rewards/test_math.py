"""Equal mathematics scores 1, different mathematics 0, and hard formulas time out."""

import json
import threading
from pathlib import Path

import pytest

from verl_mg.errors import UserError
from verl_mg.rewards import Reward, Sample, math, worker_pool

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


def score(answer: str | None, response: str) -> Reward:
    return math.score(Sample("p", response, answer, {"solution": "5"}, "stop"))


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("long division\n#### 72", "#### 72"),
        ("72", "first #### 71, no:\n#### 72 clips\nand so on 8"),
        ("1,234", "#### $1234"),
        ("7", "####\n7"),
        ("#### 1234567", "#### 1,234,567."),
        ("1234", r"\boxed{1,234}"),
        ("-5", "#### -$5"),
        ("10", "#### The answer is $10."),
        ("72", r"$71$, no, \boxed{72}, with 5 left"),
        ("72", "The answer is 72."),
        (r"\frac{1}{2}", "#### 0.5"),
        (r"$\frac12$", r"it is $\frac{2}{4}$"),
        ("3/4", "#### 0.75"),
        ("x+1", "#### 1+x"),
        ("2^{10}", "#### 1024"),
        ("18", "#### 18%"),
        ("yes", "#### yes"),
        ("yes", "#### yes\nas 2 is even"),
        ("42", "#### 42\n\n#### Check\n42-2 is 40 again."),
        ("42", "#### Step 1: add\n40+2\n\n#### Final answer\n\\boxed{42}"),
        ("42", "#### 41\n\n#### 2. Correction\nNo, it is $\\boxed{42}$."),
        ("x+1", "#### $x+1$\nwhich follows from above"),
        ("42", "<think>#### 41\n\\boxed{40}</think>\n#### 42"),
        ("42", "<|channel|>analysis<|message|>\\boxed{1}<|end|><|channel|>final<|message|>\\boxed{42}"),
        ("0.000123", r"\boxed{1.23\times 10^{-4}}"),
        (r"\frac{1}{2^{10}}", "1/1024"),
        ("10^{-12}", r"\boxed{\frac{1}{10^{12}}}"),
    ],
)
def test_score_equal_answers_return_1(answer, response):
    reward = score(answer, response)
    assert (reward.value, reward.parts) == (1.0, {"correct": 1.0, "answered": 1.0})


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("72", "#### 72\n#### 73"),
        ("2,125", "#### 2,1251"),
        ("2^{10}", "#### 2"),
        ("2x", "#### 2"),
        ("5", "#### -5"),
        ("5", "#### 0.5"),
        ("5", r"5, no, \boxed{6}"),
        ("x+1", "#### x-1"),
        ("5", "#### " + "the sum of its parts " * 20),
        ("2", "#### Step 1\nI add.\n\n#### Step 2\nIt is \\boxed{42}."),
        ("2", "#### 1. Add\n#### Step 2"),
        ("3", "#### Part 3\nThere is no answer."),
        ("42", "<think>#### 42\n</think>I do not know."),
        ("42", "<think>it may be \\boxed{42}, but"),
        (r"9.1\times 10^{-31}", r"\boxed{6.02\times 10^{-23}}"),
        ("0.0000004", r"\boxed{0.0000003}"),
        ("0", r"\boxed{0.0000001}"),
        (r"\frac{1}{2006!}", r"\boxed{\frac{1}{2004!}}"),
        (r"(10^{-9}, 1)", r"\boxed{(2\times 10^{-9}, 1)}"),
        (r"x=10^{-9}", r"\boxed{x=3\times 10^{-9}}"),
    ],
)
def test_score_different_answers_return_0(answer, response):
    assert score(answer, response).value == 0.0


@pytest.mark.parametrize("response", ["", "I do not know", "####", "5 ####  \n"])
def test_score_response_without_answer_returns_0(response):
    assert score("5", response) == Reward(0.0, {"correct": 0.0, "answered": 0.0})


@pytest.mark.parametrize("answer", [None, "", " \n"])
def test_score_record_without_answer_raises(answer):
    with pytest.raises(UserError, match=r"data.answer_field to one of: solution"):
        score(answer, "5")


def test_score_record_with_only_a_mark_returns_0():
    assert score("####", "anything").value == 0.0


def test_score_hard_formula_times_out_on_any_thread(monkeypatch):
    assert score("5", "5").value == 1.0  # what takes long the first time is done
    monkeypatch.setattr(math, "SECONDS", 1)  # here; that of the worker process follows
    limited = "from verl_mg.rewards import math\nmath.SECONDS = 2\nrun_worker("
    monkeypatch.setattr(worker_pool, "PROGRAM", worker_pool.PROGRAM.replace("run_worker(", limited))
    pool = worker_pool.WorkerPool("verl_mg.rewards.math:is_equivalent", limit=1, seconds=600.0)
    monkeypatch.setattr(math, "shared_pool", lambda *limits, **seconds: pool)
    hard = r"\boxed{9^{9^{9}}}"
    assert score("5", hard) == Reward(0.0, {"correct": 0.0, "answered": 1.0}, "9**(9**9)")
    results: list[Reward] = []
    thread = threading.Thread(target=lambda: results.extend([score("5", hard), score("1/2", "0.5")]))
    thread.start()
    thread.join()
    pool.close()
    assert [reward.value for reward in results] == [0.0, 1.0]


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"GSM8K is not at {GSM8K}")
def test_score_real_gsm8k_answers_score_1():
    rows = [json.loads(line) for line in (GSM8K / "test.jsonl").open(encoding="utf-8")][:400]
    for number, row in enumerate(rows):
        answer = row["answer"]
        final = answer.split("####")[1].strip()
        assert score(answer, answer).value == 1.0
        assert score(answer, f"It comes to \\boxed{{{final}}}.").value == 1.0
        if number % 4:  # a comparison of different answers takes milliseconds
            continue
        assert score(answer, answer + "1").value == 0.0
        wrong = str(int(final.replace(",", "")) + 1)
        assert score(answer, answer.replace(f"#### {final}", f"#### {wrong}")).value == 0.0
