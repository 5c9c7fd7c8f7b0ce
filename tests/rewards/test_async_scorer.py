"""Samples are scored while the caller does something else, and the results are those of asking one by one."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from verl_mg.config import RewardConfig, WeightedRewardConfig
from verl_mg.errors import UserError
from verl_mg.rewards import AsyncScorer, LoadedReward, Mixture, Reward, Sample, load_reward, load_rewards

WAIT = 30.0


def sample(response: str, answer: str | None = None) -> Sample:
    return Sample("p", response, answer, {}, "stop")


def panel_of(function: Any, workers: int = 4, **about: Any) -> AsyncScorer:
    return AsyncScorer({"": LoadedReward("own", function, batched=False, **about)}, workers=workers)


def panel_of_batches(owner: Any, workers: int = 4) -> AsyncScorer:
    return AsyncScorer({"": LoadedReward("own", owner.score_many, batched=True, owner=owner)}, workers=workers)


class Batches:
    """Remembers the batches; the first waits until it may go on."""

    batch_size = 4

    def __init__(self) -> None:
        self.seen: list[list[str]] = []
        self.threads: set[int] = set()
        self.go_on = threading.Event()

    def score_many(self, samples: Sequence[Sample]) -> list[float]:
        self.seen.append([sample.response for sample in samples])
        self.threads.add(threading.get_ident())
        assert self.go_on.wait(WAIT)
        return [float(sample.response) for sample in samples]


def test_begin_returns_at_once_and_sync_rewards_run_side_by_side() -> None:
    together = threading.Barrier(4)

    def score(sample: Sample) -> float:
        together.wait(WAIT)  # which ends only when four are here
        return float(sample.response)

    with panel_of(score) as panel:
        for key in range(8):
            panel.begin(key, sample(str(key)))
        assert [panel.result(key).value for key in reversed(range(8))] == list(map(float, reversed(range(8))))
        assert panel.result(3) == Reward(3.0)  # as often as one likes


def test_async_rewards_run_side_by_side_up_to_the_limit() -> None:
    running: list[int] = [0, 0]  # now, and at most

    async def score(sample: Sample) -> float:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.02)
        running[0] -= 1
        return float(sample.response)

    with panel_of(score, workers=3) as panel:
        assert [reward.value for reward in panel.score([sample(str(i)) for i in range(9)])] == list(range(9))
    assert running == [0, 3]


def test_a_batch_is_what_waits_when_the_reward_is_free() -> None:
    batches = Batches()
    with panel_of_batches(batches) as panel:
        panel.begin(0, sample("0"))
        while not batches.seen:
            time.sleep(0.01)
        for key in range(1, 8):
            panel.begin(key, sample(str(key)))
        panel.forget(2)
        time.sleep(0.05)
        batches.go_on.set()
        assert [panel.result(key).value for key in (0, 1, 3, 7)] == [0.0, 1.0, 3.0, 7.0]
    assert batches.seen == [["0"], ["1", "3", "4", "5"], ["6", "7"]]


def test_a_reward_that_takes_batches_may_allow_several_at_once() -> None:
    class Together:
        batch_size, parallel = 1, 3

        def __init__(self) -> None:
            self.barrier = threading.Barrier(3)

        def score_many(self, samples: Sequence[Sample]) -> list[float]:
            self.barrier.wait(WAIT)
            return [1.0] * len(samples)

    with panel_of_batches(Together()) as panel:
        assert len(panel.score([sample("")] * 3)) == 3


def test_results_do_not_depend_on_timing() -> None:
    source = random.Random(0)

    async def score(sample: Sample) -> Reward:
        await asyncio.sleep(source.random() * 0.01)
        return Reward(len(sample.response) / 7, {"first": ord(sample.response[0])}, sample.response)

    samples = [sample(chr(65 + i) * i) for i in range(1, 20)]
    with panel_of(score) as panel:
        assert panel.score(samples) == panel.score(samples) == [panel(sample) for sample in samples]


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
def test_a_failure_is_one_clear_error(function: Any, reason: str) -> None:
    with panel_of(function) as panel:
        panel.begin(1, sample("2"))
        for _ in range(2):
            with pytest.raises(UserError, match=reason):
                panel.result(1)
    with panel_of(fails_on_two) as panel:  # others are not touched
        panel.begin(1, sample("2"))
        panel.begin(2, sample("3"))
        assert panel.result(2).value == 1.0


def test_a_batch_that_fails_fails_whole() -> None:
    class Broken:
        def score_many(self, samples: Sequence[Sample]) -> list[float]:
            raise OSError("no such disk")

    with panel_of_batches(Broken()) as panel, pytest.raises(UserError, match="own' raised OSError: no such disk"):
        panel.score([sample("1"), sample("2")])


def test_what_is_forgotten_ends_where_it_can() -> None:
    ended, started = threading.Event(), threading.Event()

    async def score(sample: Sample) -> float:
        try:
            started.set()
            await asyncio.sleep(600)
        finally:
            ended.set()
        return 0.0

    with panel_of(score) as panel:
        panel.begin(1, sample(""))
        assert started.wait(WAIT)
        panel.forget(1)
        panel.forget(1)
        assert ended.wait(WAIT)
        panel.begin(1, sample(""))  # the key is free again; `close` ends this one
    panel.close()


def test_keys_are_used_once() -> None:
    with panel_of(len) as panel:
        panel.begin(1, sample(""))
        with pytest.raises(ValueError, match="key 1"):
            panel.begin(1, sample(""))


def test_close_lets_the_rewards_go(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        f"class Own:\n    def score(self, sample): return 1\n"
        f"    def close(self): open({str(tmp_path / 'closed')!r}, 'w').close()\n"
    )
    before = threading.active_count()
    with load_rewards(RewardConfig(function=f"{tmp_path}/own.py:Own")) as panel:
        assert panel(sample("")).value == 1.0
    assert (tmp_path / "closed").exists()
    assert threading.active_count() == before


def test_mathematics_off_the_main_thread() -> None:
    responses = [(r"\boxed{\frac{1}{2}}", 1.0), ("#### 1/2", 1.0), ("it is 2", 0.0), (r"$\frac{2}{4}$", 1.0)] * 6
    with load_rewards(RewardConfig(workers=4)) as panel:
        rewards = panel.score([sample(response, "0.5") for response, _ in responses])
    assert [reward.value for reward in rewards] == [value for _, value in responses]
    assert {reward.answer for reward in rewards if reward.value} == {"1/2"}


def test_a_mixture_asks_all_and_weighs_when_the_result_is_asked_for() -> None:
    config = RewardConfig(
        mixture={
            "right": WeightedRewardConfig(function="verl_mg.rewards.exact:score", weight=2.0),
            "form": WeightedRewardConfig(
                function="verl_mg.rewards.regex_format:Form", options={"pattern": "[0-9]+"}, weight=0.5
            ),
        }
    )
    with load_rewards(config) as panel:
        panel.begin(1, sample("12", "12"))
        panel.begin(2, sample("13", "12"))
        assert panel.result(1) == Reward(2.5, {"right": 1.0, "form": 1.0, "form/form": 1.0})
        assert panel.result(2).value == 0.5
        assert panel.mixture is not None
        panel.mixture.use({"form": -1.0})
        assert panel.result(2).value == -1.0


def test_several_rewards_need_a_mixture() -> None:
    reward = load_reward("verl_mg.rewards.exact:score")
    with pytest.raises(ValueError, match="mixture"):
        AsyncScorer({"a": reward, "b": reward})
    AsyncScorer({"a": reward, "b": reward}, mixture=Mixture({"a": 1, "b": 2})).close()
