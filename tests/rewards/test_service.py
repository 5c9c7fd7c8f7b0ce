"""HTTP services: transient failures are retried, permanent ones and malformed responses raise one clear error."""

import asyncio
import email.utils
import threading
import time
from typing import Any

import pytest

from tests.helpers.json_server import JsonRequest, JsonResponse, serving
from tests.helpers.loop_clock import pass_time
from verl_mg import http_client
from verl_mg.errors import UserError
from verl_mg.rewards import AsyncScorer, Reward, Sample, load_reward


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.01)


def samples(count: int) -> list[Sample]:
    return [Sample("1+1=", f"{'x' * number}", "2", {"level": number}, "stop") for number in range(count)]


def lengths(request: JsonRequest) -> JsonResponse:
    return JsonResponse({"rewards": [len(sample["response"]) for sample in request.body["samples"]]})


def score(url: str, count: int = 1, workers: int = 4, **options: Any) -> list[Reward]:
    service = load_reward("verl_mg.rewards.service:Service", {"url": url} | options)
    with AsyncScorer({"": service}, workers=workers) as scorer:
        return scorer.score(samples(count))


def test_service_posts_batches_and_returns_rewards():
    seen: list[JsonRequest] = []

    def answer(request: JsonRequest) -> JsonResponse:
        seen.append(request)
        return lengths(request)

    with serving(answer) as url:
        rewards = score(f"{url}/score", 20, batch_size=3, headers={"X-Key": "abc"})
    assert [reward.value for reward in rewards] == list(range(20))
    assert max(len(request.body["samples"]) for request in seen) <= 3
    sent = sorted((sample for request in seen for sample in request.body["samples"]), key=lambda s: len(s["response"]))
    scored = {"prompt": "1+1=", "response": "xxx", "answer": "2", "record": {"level": 3}, "finish": "stop"}
    assert sent[3] == scored | {"num_tokens": None}
    assert {(request.path, request.headers["x-key"]) for request in seen} == {("/score", "abc")}


def test_service_returns_parts_and_answer():
    content = {"rewards": [{"value": 0.5, "parts": {"tone": 1}, "answer": "4"}]}
    with serving(lambda _: JsonResponse(content)) as url:
        assert score(url) == [Reward(0.5, {"tone": 1.0}, "4")]


def test_service_headers_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("OWN_TOKEN", "s3cret")
    with serving(
        lambda request: JsonResponse({"rewards": [float(request.headers["authorization"] == "s3cret")]})
    ) as url:
        assert score(url, headers={"Authorization": "$OWN_TOKEN"})[0].value == 1.0
        with pytest.raises(UserError, match="header A: the environment variable NO_SUCH is not set"):
            score(url, headers={"A": "$NO_SUCH"})


class Failing:
    """Server that returns the given responses, then good ones, and records the times of the requests."""

    def __init__(self, *first: JsonResponse) -> None:
        self.first = list(first)
        self.times: list[float] = []

    def __call__(self, request: JsonRequest) -> JsonResponse:
        self.times.append(time.monotonic())
        return self.first.pop(0) if self.first else lengths(request)


def test_service_transient_failures_are_retried():
    server = Failing(JsonResponse("busy", 500), JsonResponse("busy", 503), JsonResponse("busy", 429))
    with serving(server) as url:
        assert score(url) == [Reward(0.0)]
    assert len(server.times) == 4


@pytest.mark.parametrize(
    ("response", "requests", "message"),
    [
        (JsonResponse("out of order", 500), 3, "{url}: failed 3 times, .*out of order"),
        (JsonResponse("who are you?", 403), 1, "refused with status 403: .*who are you"),
        (JsonResponse("later", 429, (("Retry-After", "86400"),)), 1, "requests a pause of 86400 s"),
    ],
)
def test_service_permanent_failure_raises(response, requests, message):
    server = Failing(*[response] * 9)
    with serving(server) as url, pytest.raises(UserError, match=message.format(url=url)):
        score(url, retries=2)
    assert len(server.times) == requests


@pytest.mark.parametrize("date", [False, True])
def test_service_retry_after_is_respected(date):
    # A date has no fractions of a second.
    latest = int(time.time() + 2)
    until = time.monotonic() + latest - time.time()
    after = email.utils.formatdate(latest, usegmt=True) if date else "1"
    server = Failing(JsonResponse("later", 429, (("Retry-After", after),)))
    with serving(server) as url:
        score(url)
    assert server.times[1] >= (until if date else server.times[0] + 1) - 0.1


def test_service_timeout_is_retried():
    done = threading.Event()
    calls: list[int] = []

    def answer(request: JsonRequest) -> JsonResponse:
        calls.append(1)
        if len(calls) == 1:
            scorer._loop.call_soon_threadsafe(pass_time, 600)
            done.wait()
        return lengths(request)

    with serving(answer) as url:
        service = load_reward("verl_mg.rewards.service:Service", {"url": url, "timeout": 600})
        with AsyncScorer({"": service}, workers=4) as scorer:
            assert scorer.score(samples(1)) == [Reward(0.0)]
        done.set()
    assert len(calls) == 2


def test_service_without_server_raises():
    with serving(lengths) as url:
        pass
    with pytest.raises(UserError, match=f"{url}: failed 2 times, the last time with .*connect"):
        score(url, retries=1)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<html>", "the response is not JSON: '<html>'"),
        (b"[" * 100_000, "the response is not JSON"),
        ({"reward": [1]}, r"the response \{'reward': \[1\]\} is malformed"),
        ([1], "is malformed. Return .*a number"),
        ({"rewards": []}, "0 rewards for 1 samples"),
        ({"rewards": ["high"]}, "the response 'high'"),
        ({"rewards": [None]}, "the response None"),
        ({"rewards": [True]}, "the response True"),
        ({"rewards": [{"parts": {}}]}, "the response {'parts'"),
        ({"rewards": [{"value": 1, "parts": {"a": "b"}}]}, "the response {'value'"),
        ({"rewards": [{"value": 1, "answer": 4}]}, "the response {'value'"),
        (b'{"rewards": [NaN]}', "returned nan"),
    ],
)
def test_service_malformed_response_raises(content, reason):
    with serving(lambda _: JsonResponse(content)) as url, pytest.raises(UserError, match=reason) as caught:
        score(url)
    assert "\n" not in str(caught.value)
    assert url in str(caught.value) or "service:Service" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "localhost:80"}, "url: 'localhost:80' is not an HTTP address. Write http://HOST"),
        ({"url": "http://a", "timeout": 0}, "Set timeout to a positive number"),
        ({"url": "http://a", "batch_size": 0}, "Give at least 1"),
    ],
)
def test_service_invalid_options_raise(options, reason):
    with pytest.raises(UserError, match=reason):
        load_reward("verl_mg.rewards.service:Service", options)


def test_service_rate_limit_is_respected():
    server = Failing()
    with serving(server) as url:
        begin = time.monotonic()
        score(url, 12, batch_size=1, requests_per_second=10)
    # Ten at once, the eleventh and twelfth a tenth of a second after each other.
    assert server.times[11] - begin >= 0.2
    assert len(server.times) == 12


def test_rate_limiter_concurrent_callers_share_the_rate():
    async def times() -> list[float]:
        limiter, begin = http_client.RateLimiter(20), time.monotonic()
        limiter._tokens = 0.0

        async def wait() -> float:
            await limiter.wait()
            return time.monotonic() - begin

        return sorted(await asyncio.gather(*(wait() for _ in range(6))))

    result = asyncio.run(times())
    assert all(seconds >= 0.05 * number - 0.01 for number, seconds in enumerate(result, 1))
