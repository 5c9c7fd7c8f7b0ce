"""Results of an engine for the rank that comes after a lost one."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from verl_mg.engines import engine_host
from verl_mg.engines.engine_host import Generation, RequestLedger
from verl_mg.engines.request_batch import RequestBatch

REQUEST: dict[str, Any] = {"max_new_tokens": 8, "seed": None, "images": []}


def request_key(rid: str, version: int, tokens: Sequence[int] = (1, 2), **changes: object) -> str:
    """Of a request that is second in its message."""
    items = [REQUEST | {"rid": "99.0", "context": 0}, REQUEST | {"rid": rid, "context": 1} | changes]
    return RequestBatch({"top_k": 0}, [[3], tokens], {}, items).keys(version)[rid]


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    return functools.wraps(test)(lambda *arguments, **options: asyncio.run(test(*arguments, **options)))


def generation(ledger: RequestLedger, rid: str, version: int, token: int, finish: str = "stop") -> Generation:
    """A request whose result is one token."""

    async def result() -> dict[str, object]:
        return {"tokens": [token], "finish": finish}

    made = Generation(rid, request_key(rid, version), version, asyncio.ensure_future(result()))
    ledger.add(made)
    return made


def answers(ledger: RequestLedger, rid: str, version: int, count: int) -> list[int | None]:
    """The tokens that a repeated request gets, each time that it is sent."""
    taken = [ledger.take(request_key(rid, version)) for _ in range(count)]
    return [one.task.result()["tokens"][0] if one else None for one in taken]


def test_key_has_sample_version_and_content():
    key = request_key("5.0", 3)
    assert key == request_key("5.77", 3)
    alone = RequestBatch({"top_k": 0}, [[1, 2]], {}, [REQUEST | {"rid": "5.3", "context": 0}])
    assert alone.keys(3) == {"5.3": key}  # whatever other requests are in its message
    others = [request_key("6.0", 3), request_key("5.0", 4), request_key("5.0", 3, tokens=(1, 3))]
    others += [request_key("5.0", 3, **change) for change in ({"seed": 1}, {"max_new_tokens": 7}, {"images": ["a"]})]
    others += [replace(alone, shared={"top_k": 5}).keys(3)["5.3"]]
    assert len({key, *others}) == 8


@in_a_loop
async def test_take_repeats_results_in_their_order_for_each_further_rank():
    ledger = RequestLedger()
    for token in (7, 8):
        await generation(ledger, "5.0", 1, token).task
    assert answers(ledger, "5.9", 1, 1) == [None]  # of the same rank: it wants a new one
    for _ in range(2):
        ledger.hand_over()
        assert answers(ledger, "5.1", 1, 3) == [7, 8, None]
        assert answers(ledger, "5.1", 2, 1) == [None]


@in_a_loop
async def test_aborted_and_interrupted_requests_are_not_repeated():
    ledger = RequestLedger()
    await generation(ledger, "1.0", 1, 7, "abort").task
    interrupted = generation(ledger, "2.0", 1, 7)
    ledger.drop_unfinished()
    await interrupted.task
    kept = generation(ledger, "3.0", 1, 7)
    await kept.task
    unfinished = generation(ledger, "4.0", 1, 8)
    ledger.hand_over()
    assert ledger.orphans() == [unfinished]
    assert [answers(ledger, f"{i}.0", 1, 1) for i in (1, 2, 3)] == [[None], [None], [7]]
    assert ledger.take(request_key("4.1", 1)) is unfinished


@in_a_loop
async def test_results_under_weights_that_are_trained_again_are_dropped():
    ledger = RequestLedger()
    for version in (3, 4):
        await generation(ledger, "1.0", version, version).task
    ledger.hand_over()
    ledger.drop_newer(3)
    assert [answers(ledger, "1.0", version, 1) for version in (3, 4)] == [[3], [None]]


@in_a_loop
async def test_oldest_results_are_dropped_when_all_are_too_large(monkeypatch):
    monkeypatch.setattr(engine_host, "MAX_BYTES", 2 * engine_host.TOKEN_BYTES)
    ledger = RequestLedger()
    for number in range(4):
        await generation(ledger, f"{number}.0", 1, number).task
    await asyncio.sleep(0)
    ledger.hand_over()
    assert [answers(ledger, f"{i}.0", 1, 1) for i in range(4)] == [[None], [None], [2], [3]]
