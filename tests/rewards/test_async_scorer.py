"""Samples are scored in the background, with the same results as one by one."""

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from verl_mg.config import RewardConfig
from verl_mg.errors import UserError
from verl_mg.rewards import AsyncScorer, LoadedReward, Mixture, Reward, Sample, load_reward, load_rewards

WAIT = 30.0


def sample(response: str, answer: str | None = None) -> Sample:
    return Sample("p", response, answer, {}, "stop")


def scorer_of(function: Any, workers: int = 4, **options: Any) -> AsyncScorer:
    return AsyncScorer({"": LoadedReward("mine", function, batched=False, **options)}, workers=workers)


def batched_scorer_of(owner: Any, workers: int = 4) -> AsyncScorer:
    return AsyncScorer({"": LoadedReward("mine", owner.score_many, batched=True, owner=owner)}, workers=workers)


class Batches:
    """Reward that records its batches; the first one waits for `may_continue`."""

    batch_size = 4

    def __init__(self) -> None:
        self.seen: list[list[str]] = []
        self.threads: set[int] = set()
        self.may_continue = threading.Event()

    def score_many(self, samples: Sequence[Sample]) -> list[float]:
        self.seen.append([sample.response for sample in samples])
        self.threads.add(threading.get_ident())
        assert self.may_continue.wait(WAIT)
        return [float(sample.response) for sample in samples]


def test_submit_blocking_rewards_run_concurrently():
    together = threading.Barrier(4)

    def score(sample: Sample) -> float:
        together.wait(WAIT)  # which ends only when four are here
        return float(sample.response)

    with scorer_of(score) as scorer:
        for key in range(8):
            scorer.submit(key, sample(str(key)))
        assert [scorer.result(key).value for key in reversed(range(8))] == list(map(float, reversed(range(8))))
        assert scorer.result(3) == Reward(3.0)  # may be called repeatedly


def test_score_async_rewards_run_concurrently_up_to_the_limit():
    running: list[int] = [0, 0]  # now, and at most

    async def score(sample: Sample) -> float:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.02)
        running[0] -= 1
        return float(sample.response)

    with load_rewards(RewardConfig(function=score, workers=3)) as scorer:
        assert [reward.value for reward in scorer.score([sample(str(i)) for i in range(9)])] == list(range(9))
    assert running == [0, 3]


def test_submit_waiting_samples_form_the_next_batch():
    batches = Batches()
    with batched_scorer_of(batches) as scorer:
        scorer.submit(0, sample("0"))
        while not batches.seen:
            time.sleep(0.01)
        for key in range(1, 8):
            scorer.submit(key, sample(str(key)))
        scorer.discard(2)
        for _ in range(2):  # the loop does all that it was given before
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), scorer._loop).result()
        batches.may_continue.set()
        assert [scorer.result(key).value for key in (0, 1, 3, 7)] == [0.0, 1.0, 3.0, 7.0]
    assert batches.seen == [["0"], ["1", "3", "4", "5"], ["6", "7"]]


def test_score_parallel_batches_run_concurrently():
    class Together:
        batch_size, parallel, barrier = 1, 3, threading.Barrier(3)

        def score_many(self, samples: Sequence[Sample]) -> list[float]:
            self.barrier.wait(WAIT)
            return [1.0] * len(samples)

    with batched_scorer_of(Together()) as scorer:
        assert len(scorer.score([sample("")] * 3)) == 3


def test_score_results_do_not_depend_on_timing():
    source = random.Random(0)

    async def score(sample: Sample) -> Reward:
        await asyncio.sleep(source.random() * 0.01)
        return Reward(len(sample.response) / 7, {"first": ord(sample.response[0])}, sample.response)

    samples = [sample(chr(65 + i) * i) for i in range(1, 20)]
    with scorer_of(score) as scorer:
        assert scorer.score(samples) == scorer.score(samples) == [scorer(sample) for sample in samples]


def fails_on_two(sample: Sample) -> float:
    return 1.0 / (float(sample.response) - 2)


def leaves(sample: Sample) -> float:
    raise StopIteration


async def is_cancelled(sample: Sample) -> float:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("function", "reason"),
    [(fails_on_two, "ZeroDivisionError"), (leaves, "StopIteration"), (is_cancelled, "was cancelled")],
)
def test_result_failed_reward_raises(function, reason):
    with scorer_of(function) as scorer:
        scorer.submit(1, sample("2"))
        for _ in range(2):
            with pytest.raises(UserError, match=reason):
                scorer.result(1)
    with scorer_of(fails_on_two) as scorer:  # others are not touched
        scorer.submit(1, sample("2"))
        scorer.submit(2, sample("3"))
        assert scorer.result(2).value == 1.0


def test_discard_cancels_async_rewards():
    ended, started = threading.Event(), threading.Event()

    async def score(sample: Sample) -> float:
        try:
            started.set()
            await asyncio.sleep(600)
        finally:
            ended.set()
        return 0.0

    with scorer_of(score) as scorer:
        scorer.submit(1, sample(""))
        assert started.wait(WAIT)
        scorer.discard(1)
        scorer.discard(1)
        assert ended.wait(WAIT)
        scorer.submit(1, sample(""))  # the key is free again; `close` ends this one
    scorer.close()


def test_submit_used_key_raises():
    with scorer_of(len) as scorer:
        scorer.submit(1, sample(""))
        with pytest.raises(ValueError, match="key 1"):
            scorer.submit(1, sample(""))


def test_close_closes_rewards_and_threads(tmp_path):
    (tmp_path / "mine.py").write_text(
        f"class Own:\n    def score(self, sample): return 1\n"
        f"    def close(self): open({str(tmp_path / 'closed')!r}, 'w').close()\n"
    )
    before = threading.active_count()
    with load_rewards(RewardConfig(function=f"{tmp_path}/mine.py:Own")) as scorer:
        assert scorer(sample("")).value == 1.0
    assert (tmp_path / "closed").exists()
    assert threading.active_count() == before


def test_score_mathematics_in_worker_threads():
    responses = [(r"\boxed{\frac{1}{2}}", 1.0), ("#### 1/2", 1.0), ("it is 2", 0.0), (r"$\frac{2}{4}$", 1.0)] * 6
    with load_rewards(RewardConfig(workers=4)) as scorer:
        rewards = scorer.score([sample(response, "0.5") for response, _ in responses])
    assert [reward.value for reward in rewards] == [value for _, value in responses]
    assert {reward.answer for reward in rewards if reward.value} == {"1/2"}


def test_result_mixture_uses_the_current_weights():
    form = {"function": "verl_mg.rewards.regex_format:RegexFormat", "options": {"pattern": "[0-9]+"}, "weight": 0.5}
    right = {"function": "verl_mg.rewards.exact:score", "weight": 2.0}
    with load_rewards(RewardConfig.model_validate({"mixture": {"right": right, "form": form}})) as scorer:
        scorer.submit(1, sample("12", "12"))
        scorer.submit(2, sample("13", "12"))
        assert scorer.result(1) == Reward(2.5, {"right": 1.0, "form": 1.0, "form/form": 1.0})
        assert scorer.result(2).value == 0.5
        scorer.mixture.use({"form": -1.0})
        assert scorer.result(2).value == -1.0


def test_scorer_several_rewards_without_mixture_raise():
    reward = load_reward("verl_mg.rewards.exact:score")
    with pytest.raises(ValueError, match="mixture"):
        AsyncScorer({"a": reward, "b": reward})
    AsyncScorer({"a": reward, "b": reward}, mixture=Mixture({"a": 1, "b": 2})).close()
