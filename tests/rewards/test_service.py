"""A service that fails, is slow, or talks rubbish: asked again where that may help, one clear error where not."""

from __future__ import annotations

import asyncio
import email.utils
import threading
import time
from typing import Any

import pytest

from tests.rewards.servers import Answer, Asked, serving
from verl_mg.errors import UserError
from verl_mg.rewards import AsyncScorer, Reward, Sample, http, load_reward


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.01)


def samples(count: int) -> list[Sample]:
    return [Sample("1+1=", f"{'x' * number}", "2", {"level": number}, "stop") for number in range(count)]


def lengths(asked: Asked) -> Answer:
    return Answer({"rewards": [len(sample["response"]) for sample in asked.body["samples"]]})


def score(url: str, count: int = 1, workers: int = 4, **options: Any) -> list[Reward]:
    service = load_reward("verl_mg.rewards.service:Service", {"url": url} | options)
    with AsyncScorer({"": service}, workers=workers) as panel:
        return panel.score(samples(count))


def test_batches_go_there_and_rewards_come_back() -> None:
    seen: list[Asked] = []

    def answer(asked: Asked) -> Answer:
        seen.append(asked)
        return lengths(asked)

    with serving(answer) as url:
        rewards = score(f"{url}/score", 20, batch_size=3, headers={"X-Key": "abc"})
    assert [reward.value for reward in rewards] == list(range(20))
    assert max(len(asked.body["samples"]) for asked in seen) <= 3
    sent = sorted((sample for asked in seen for sample in asked.body["samples"]), key=lambda s: len(s["response"]))
    assert sent[3] == {"prompt": "1+1=", "response": "xxx", "answer": "2", "record": {"level": 3}, "finish": "stop"}
    assert {(asked.path, asked.headers["x-key"]) for asked in seen} == {("/score", "abc")}


def test_rewards_with_parts() -> None:
    content = {"rewards": [{"value": 0.5, "parts": {"tone": 1}, "answer": "4"}]}
    with serving(lambda _: Answer(content)) as url:
        assert score(url) == [Reward(0.5, {"tone": 1.0}, "4")]


def test_secrets_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_TOKEN", "s3cret")
    with serving(lambda asked: Answer({"rewards": [float(asked.headers["authorization"] == "s3cret")]})) as url:
        assert score(url, headers={"Authorization": "$OWN_TOKEN"})[0].value == 1.0
        with pytest.raises(UserError, match="header A: the environment has no variable NO_SUCH"):
            score(url, headers={"A": "$NO_SUCH"})


class Failing:
    """Gives the answers it was made with, then good ones; knows when it was asked."""

    def __init__(self, *first: Answer) -> None:
        self.first = list(first)
        self.times: list[float] = []

    def __call__(self, asked: Asked) -> Answer:
        self.times.append(time.monotonic())
        return self.first.pop(0) if self.first else lengths(asked)


def test_failures_that_pass_are_waited_out() -> None:
    server = Failing(Answer("busy", 500), Answer("busy", 503), Answer("busy", 429))
    with serving(server) as url:
        assert score(url) == [Reward(0.0)]
    assert len(server.times) == 4


def test_failures_that_stay_are_an_error() -> None:
    server = Failing(*[Answer("out of order", 500)] * 9)
    with serving(server) as url, pytest.raises(UserError, match=f"{url}: failed 3 times, .*out of order"):
        score(url, retries=2)
    assert len(server.times) == 3


def test_a_refusal_is_an_error_at_once() -> None:
    server = Failing(Answer("who are you?", 403))
    with serving(server) as url, pytest.raises(UserError, match="refused with status 403: .*who are you"):
        score(url)
    assert len(server.times) == 1


@pytest.mark.parametrize("date", [False, True])
def test_retry_after_is_honoured(date: bool) -> None:
    # A date has no fractions of a second.
    after = email.utils.formatdate(time.time() + 2, usegmt=True) if date else "1"
    server = Failing(Answer("later", 429, (("Retry-After", after),)))
    with serving(server) as url:
        score(url)
    assert server.times[1] - server.times[0] >= 0.9


def test_a_day_is_not_waited() -> None:
    server = Failing(Answer("later", 429, (("Retry-After", "86400"),)))
    with serving(server) as url, pytest.raises(UserError, match="asks to be left alone for 86400 s"):
        score(url)


def test_a_slow_answer_is_asked_for_again() -> None:
    done = threading.Event()
    calls: list[int] = []

    def answer(asked: Asked) -> Answer:
        calls.append(1)
        if len(calls) == 1:
            done.wait(30)
        return lengths(asked)

    with serving(answer) as url:
        assert score(url, timeout=0.5) == [Reward(0.0)]
        done.set()
    assert len(calls) == 2


def test_no_server() -> None:
    with serving(lengths) as url:
        pass
    with pytest.raises(UserError, match=f"{url}: failed 2 times, at last with .*connect"):
        score(url, retries=1)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<html>", "the answer is not JSON: '<html>'"),
        (b"[" * 100_000, "the answer is not JSON"),
        ({"reward": [1]}, r"answered \{'reward': \[1\]\}; answer"),
        ([1], "answer .*a number"),
        ({"rewards": []}, "0 rewards for 1 samples"),
        ({"rewards": ["high"]}, "answered 'high'"),
        ({"rewards": [None]}, "answered None"),
        ({"rewards": [True]}, "answered True"),
        ({"rewards": [{"parts": {}}]}, "answered {'parts'"),
        ({"rewards": [{"value": 1, "parts": {"a": "b"}}]}, "answered {'value'"),
        ({"rewards": [{"value": 1, "answer": 4}]}, "answered {'value'"),
        (b'{"rewards": [NaN]}', "returned nan"),
    ],
)
def test_rubbish_is_one_clear_error(content: Any, reason: str) -> None:
    with serving(lambda _: Answer(content)) as url, pytest.raises(UserError, match=reason) as caught:
        score(url)
    assert "\n" not in str(caught.value)
    assert url in str(caught.value) or "service:Service" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "localhost:80"}, "url is 'localhost:80': write http://HOST"),
        ({"url": "http://a", "timeout": 0}, "timeout must be positive"),
        ({"url": "http://a", "batch_size": 0}, "give at least 1"),
    ],
)
def test_bad_options(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load_reward("verl_mg.rewards.service:Service", options)


def test_requests_a_second_are_limited() -> None:
    server = Failing()
    with serving(server) as url:
        score(url, 12, batch_size=1, requests_per_second=10)
    # Ten at once, the eleventh and twelfth a tenth of a second after each other.
    assert server.times[11] - server.times[0] >= 0.15
    assert len(server.times) == 12


def test_the_pace_holds_for_all_that_wait() -> None:
    async def times() -> list[float]:
        pace = http.RateLimiter(20)
        pace._tokens = 0.0

        async def one() -> float:
            await pace.wait()
            return time.monotonic()

        return sorted(await asyncio.gather(*(one() for _ in range(6))))

    found = asyncio.run(times())
    assert found[5] - found[0] >= 0.2
