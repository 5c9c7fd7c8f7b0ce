"""Conversations of several turns: an engine writes, tools answer, the engine goes on.

    engine:  turn 1 of A | turn 1 of B | turn 2 of A  ...          `collect` moves samples from one to the other
    tools:                 calls of A    calls of B                an event loop in a thread of its own

A sample that ends with tool calls leaves the engine, its calls run side by side, and it goes back with their results
behind it; meanwhile the engine works on others.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

from verl_mg.rollout.engine import NOT_GENERATED, Request, RolloutEngine, Sample, Sampling
from verl_mg.rollout.tools.chat_format import MALFORMED, ToolCall, ToolCallFormat, ToolResult
from verl_mg.rollout.tools.tool import Tool, call_tool

POLL_SECONDS = 0.02  # how long a result may wait for the engine to be asked again
GATHER_SECONDS = 0.1  # an engine with nothing to do gets the results together that come this close to each other
CALLS_AT_ONCE = 32  # each may be a process

UNREADABLE = "error: the tool call cannot be read; write it in the format that was described"


@dataclass(frozen=True)
class _Waiting:
    """A sample whose calls are being answered."""

    sample: Sample
    calls: list[ToolCall]
    results: Future[list[str]]


class MultiTurnEngine(RolloutEngine):
    """Another engine, whose samples call tools between their turns.

    A sample comes out when a turn ends without calls, after `max_turns` turns, or at `max_new_tokens`, which bounds
    everything behind the prompt. A turn is what the engine writes at a time. Results become tokens with log-prob 0 and
    version OBSERVED; those that leave no room for a token behind them are left out, and the sample's finish is
    "length". What the engine has written is never turned into text and back: the context of a turn is the prompt and
    every token since.

    A sample cut by `abort` can be gone on with, as with any engine: calls that had no results yet are made again, and
    the turns before count.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        dialogue: ToolCallFormat,
        tools: Sequence[Tool],
        *,
        max_turns: int,
        tool_timeout: float,
    ) -> None:
        """tool_timeout: seconds for each call, from when it starts; at most `CALLS_AT_ONCE` run at once."""
        self._engine, self._dialogue = engine, dialogue
        self._tools = {tool.name: tool for tool in tools}
        self._max_turns, self._tool_timeout = max_turns, tool_timeout
        self._asked: dict[int, tuple[Request, Sampling]] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._cut: set[int] = set()
        self._done: list[Sample] = []
        # `abort` may come from another thread, between any two steps of `collect`.
        self._lock = threading.RLock()
        self._answered: queue.SimpleQueue[tuple[int, Future[list[str]]]] = queue.SimpleQueue()
        self._calls_at_once = asyncio.Semaphore(CALLS_AT_ONCE)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="tools", daemon=True).start()

    def num_free_slots(self) -> int:
        """That of the engine, less the samples that will come back to it."""
        return self._engine.num_free_slots() - len(self._waiting)

    def num_queue_slots(self) -> int:
        """That of the engine."""
        return self._engine.num_queue_slots()

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """See `RolloutEngine`."""
        with self._lock:
            # These were cut while their calls ran: the engine has nothing more to write of the turn.
            ended = [request for request in requests if request.partial and _stopped(request.partial, sampling)]
            ids = {request.id for request in ended}
            self._engine.submit([request for request in requests if request.id not in ids], sampling)
            self._asked |= {request.id: (request, sampling) for request in requests}
            for request in ended:
                assert request.partial is not None
                self._take(replace(request.partial, id=request.id, finish="stop"))

    def collect(self, timeout: float) -> list[Sample]:
        """See `RolloutEngine`; without anything in flight it returns at once."""
        until = time.monotonic() + timeout
        while True:
            left = max(until - time.monotonic(), 0.0)
            writing = len(self._asked) > len(self._waiting)
            self._go_on(0.0 if writing else left)
            if writing:
                samples = self._engine.collect(min(left, POLL_SECONDS) if self._waiting else left)
                with self._lock:
                    for sample in samples:
                        self._take(sample)
            with self._lock:
                if self._done or not self._asked or time.monotonic() >= until:
                    done, self._done = self._done, []
                    return done

    def abort(self) -> None:
        """See `RolloutEngine`."""
        with self._lock:
            for waiting in list(self._waiting.values()):
                waiting.results.cancel()
                self._give(replace(waiting.sample, finish="abort"))
            self._cut |= self._asked.keys()
            self._engine.abort()

    def health(self) -> bool:
        """That of the engine."""
        return self._engine.health()

    def _take(self, sample: Sample) -> None:
        """A sample from the engine: on to its calls, or out."""
        sampling = self._asked[sample.id][1]
        calls: list[ToolCall] = []
        if sample.finish == "stop" and _turns(sample) < self._max_turns:
            calls = self._dialogue.calls(_last_turn(sample, sampling))
        if not calls:
            self._give(sample)
        elif sample.id in self._cut:
            self._give(replace(sample, finish="abort"))
        else:
            results = asyncio.run_coroutine_threadsafe(self._answer_all(calls), self._loop)
            self._waiting[sample.id] = _Waiting(sample, calls, results)
            results.add_done_callback(lambda future: self._answered.put((sample.id, future)))

    def _give(self, sample: Sample) -> None:
        del self._asked[sample.id]
        self._waiting.pop(sample.id, None)
        self._cut.discard(sample.id)
        self._done.append(sample)

    def _go_on(self, patience: float) -> None:
        """Send samples whose calls are answered back to the engine; waits up to `patience` seconds for the first."""
        answered = self._wait_for_results(patience)
        with self._lock:
            # A sample may have been cut since, and even have come back: its results are others now.
            current = [i for i, future in answered if i in self._waiting and self._waiting[i].results is future]
            batches: dict[Sampling, list[Request]] = {}
            for i in current:
                sampling = self._asked[i][1]
                if (request := self._continued(i)) is not None:
                    batches.setdefault(sampling, []).append(request)
            for sampling, requests in batches.items():
                self._engine.submit(requests, sampling)

    def _wait_for_results(self, patience: float) -> list[tuple[int, Future[list[str]]]]:
        answered: list[tuple[int, Future[list[str]]]] = []
        until = time.monotonic() + patience
        with suppress(queue.Empty):
            while len(answered) < len(self._waiting):
                answered.append(self._answered.get(timeout=max(until - time.monotonic(), 0.0)))
                until = min(until, time.monotonic() + GATHER_SECONDS)
        return answered

    def _continued(self, sample_id: int) -> Request | None:
        """The request for the next turn of a sample whose results are there; None where there is no room for one."""
        (request, sampling), waiting = self._asked[sample_id], self._waiting.pop(sample_id)
        sample = waiting.sample
        names = [call.name for call in waiting.calls]
        results = [ToolResult(name, text) for name, text in zip(names, waiting.results.result(), strict=True)]
        tokens = self._dialogue.observation(sample.tokens[-1], results)
        if len(sample.tokens) + len(tokens) >= sampling.max_new_tokens:
            self._give(replace(sample, finish="length"))
            return None
        return replace(request, partial=_observing(sample, tokens))

    async def _answer_all(self, calls: Sequence[ToolCall]) -> list[str]:
        return list(await asyncio.gather(*map(self._answer, calls)))

    async def _answer(self, call: ToolCall) -> str:
        if call is MALFORMED:
            return UNREADABLE
        async with self._calls_at_once:
            return await call_tool(self._tools, call.name, call.arguments, self._tool_timeout)


def _stopped(sample: Sample, sampling: Sampling) -> bool:
    """Whether its last token is one that the policy ended a turn with."""
    return sample.generated_mask[-1:] == (True,) and sample.tokens[-1] in sampling.stop_token_ids


def _turns(sample: Sample) -> int:
    """How many turns have begun: observations stand between them."""
    return 1 + sum(not written for written, _ in groupby(sample.generated_mask))


def _last_turn(sample: Sample, sampling: Sampling) -> tuple[int, ...]:
    """What was written since the last observation, without the token that ended it."""
    behind = len(sample.tokens)
    while behind and sample.policy_versions[behind - 1] != NOT_GENERATED:
        behind -= 1
    turn = sample.tokens[behind:]
    return turn[:-1] if _stopped(sample, sampling) else turn


def _observing(sample: Sample, tokens: tuple[int, ...]) -> Sample:
    """The sample with an observation behind it. Its experts stay those of the tokens that were fed so far."""
    seen = Sample(sample.id, tokens, (0.0,) * len(tokens), (NOT_GENERATED,) * len(tokens), "abort")
    return replace(sample.extended_by(seen), routed_experts=sample.routed_experts)
