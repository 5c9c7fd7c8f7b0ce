"""Multi-turn generation: the engine generates a turn, tools are called, the engine continues with their results.

    engine:  turn 1 of A | turn 1 of B | turn 2 of A  ...          `collect` moves samples from one to the other
    tools:                 calls of A    calls of B                an event loop in a separate thread

    submit --> in the engine --- turn ends with calls ---> pending: its calls run --- results ---> in the engine
                  |                                           |           |
                  | no calls, max_turns, length               | abort     | no space for the results
                  v                                           v           v
               complete                                    "abort"     "length"

Calls of a turn run concurrently, and meanwhile the engine generates other samples. Example of a sample: tokens
`7 8 9 | 4 5 | 6 9`, policy versions `3 3 3 | -1 -1 | 3 3`: a turn, its results (NOT_GENERATED), the last turn.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from verl_mg.agents.tool_calls import ToolCall
from verl_mg.agents.tools.chat_format import ToolCallFormat
from verl_mg.agents.tools.tool import Tool, ToolOutput, ToolSample
from verl_mg.agents.tools.tool_runner import ToolRunner
from verl_mg.engines.engine import EngineWrapper, Request, RolloutEngine, Sample, Sampling
from verl_mg.engines.stop_strings import last_turn_start
from verl_mg.engines.trajectory import NOT_GENERATED
from verl_mg.images import RowImages

POLL_SECONDS = 0.02  # longest time that a result waits until the engine is polled
GATHER_SECONDS = 0.1  # an idle engine receives results that arrive within this time together


@dataclass(frozen=True)
class _PendingCalls:
    """A sample whose tool calls are running."""

    sample: Sample
    calls: list[ToolCall]
    results: Future[list[str | ToolOutput]]


class MultiTurnEngine(EngineWrapper):
    """Wrapper around an engine whose samples call tools between their turns.

    A sample is complete when a turn ends without calls, after `max_turns` turns, or at `max_new_tokens`, which limits
    all tokens after the prompt. Results become tokens with log-prob 0 and policy version NOT_GENERATED; results that
    leave no space for another token are dropped, and the sample's finish is "length". Generated tokens are never
    converted to text and back: the context of a turn is the prompt and all tokens since.

    An aborted sample can be resumed, as with any engine: calls without results are made again, and the earlier turns
    count. States of tools end with an aborted sample: before its next call the earlier ones, which its tokens contain,
    are repeated in a new state.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        chat_format: ToolCallFormat,
        tools: Sequence[Tool],
        *,
        max_turns: int,
        tool_timeout: float,
    ) -> None:
        super().__init__(engine)
        self._format, self._max_turns = chat_format, max_turns
        self._runner = ToolRunner(tools, tool_timeout)
        self._requests: dict[int, tuple[Request, Sampling]] = {}
        self._pending: dict[int, _PendingCalls] = {}
        self._aborted: set[int] = set()
        self._done: list[Sample] = []
        # `abort` may come from another thread, between any two steps of `collect`.
        self._lock = threading.RLock()
        self._with_results: queue.SimpleQueue[tuple[int, Future[list[str | ToolOutput]]]] = queue.SimpleQueue()

    def num_free_slots(self) -> int:
        """Returns the free slots of the engine minus the samples that will return to it."""
        return self._engine.num_free_slots() - len(self._pending)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Submits requests to the engine; samples that were aborted during their calls repeat these first."""
        with self._lock:
            # Samples that were aborted while their calls ran: their turn itself is complete.
            ended = [request for request in requests if request.partial and _stopped(request.partial, sampling)]
            ids = {request.id for request in ended}
            self._engine.submit([request for request in requests if request.id not in ids], sampling)
            self._requests |= {request.id: (request, sampling) for request in requests}
            for request in ended:
                assert request.partial is not None
                self._process(replace(request.partial, id=request.id, finish="stop"))

    def collect(self, timeout: float) -> list[Sample]:
        """Returns completed samples; returns immediately where nothing is in flight.

        The loop consumes results of tools and samples of the engine, waits in the engine while it generates and for
        results otherwise, and ends with a complete sample or at the time limit.
        """
        deadline = time.monotonic() + timeout
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            generating = len(self._requests) > len(self._pending)
            self._resume(0.0 if generating else left)
            if generating:
                # Results that arrive in the meantime wait for the end of this call.
                samples = self._engine.collect(min(left, POLL_SECONDS) if self._pending else left)
                with self._lock:
                    for sample in samples:
                        self._process(sample)
            with self._lock:
                if self._done or not self._requests or time.monotonic() >= deadline:
                    done, self._done = self._done, []
                    return done

    def abort(self) -> None:
        """Aborts running calls and the engine's requests."""
        with self._lock:
            self._abort_calls(self._requests.keys())
            self._engine.abort()

    def abort_samples(self, ids: Collection[int]) -> None:
        """Aborts running calls and the engine's requests of some samples."""
        with self._lock:
            self._abort_calls(ids)
            self._engine.abort_samples(ids)

    def _abort_calls(self, ids: Collection[int]) -> None:
        for i in [i for i in self._pending if i in ids]:
            self._pending[i].results.cancel()
            self._complete(replace(self._pending[i].sample, finish="abort"))
        self._aborted |= self._requests.keys() & set(ids)

    def close(self) -> None:
        """Cancels running calls, closes the states of tools and ends the event loop; the engine stays as it is."""
        with self._lock:
            for pending in self._pending.values():
                pending.results.cancel()
        self._runner.close()

    def _process(self, sample: Sample) -> None:
        """Starts the calls of a sample from the engine, or completes the sample."""
        request, sampling = self._requests[sample.id]
        calls: list[ToolCall] = []
        if sample.finish == "stop" and _num_turns(sample) < self._max_turns:
            start = last_turn_start(sample)
            turn = sample.tokens[start:-1] if _stopped(sample, sampling) else sample.tokens[start:]
            calls = self._format.calls(turn, (*request.prompt, *sample.tokens[:start]))
        if not calls:
            self._complete(sample)
        elif sample.id in self._aborted:  # the engine has completed the turn before the abort reached it
            self._complete(replace(sample, finish="abort"))
        else:
            if not self._runner.has_begun(sample.id):
                self._begin_calls(request, sampling)
            results = self._runner.start(sample.id, calls)
            self._pending[sample.id] = _PendingCalls(sample, calls, results)
            results.add_done_callback(lambda future: self._with_results.put((sample.id, future)))

    def _complete(self, sample: Sample) -> None:
        del self._requests[sample.id]
        self._pending.pop(sample.id, None)
        self._aborted.discard(sample.id)
        self._runner.end(sample.id)
        self._done.append(sample)

    def _begin_calls(self, request: Request, sampling: Sampling) -> None:
        origin, earlier = request.origin, []
        if request.partial is not None and self._runner.has_states:
            turns = _turns_with_results(request, request.partial, sampling)
            earlier = [call for before, turn in turns for call in self._format.calls(turn, before)]
        sample = ToolSample(origin.text, origin.answer, origin.record) if origin else ToolSample("", None, {})
        self._runner.begin(request.id, sample, earlier)

    def _resume(self, timeout: float) -> None:
        """Submits samples with results to the engine again; waits up to `timeout` seconds for the first result."""
        results = self._wait_for_results(timeout)
        with self._lock:
            # The sample may have been aborted and submitted again since then: its current results are others.
            current = [i for i, future in results if i in self._pending and self._pending[i].results is future]
            batches: dict[Sampling, list[Request]] = {}
            for i in current:
                sampling = self._requests[i][1]
                if (request := self._next_turn(i)) is not None:
                    batches.setdefault(sampling, []).append(request)
            for sampling, requests in batches.items():
                self._engine.submit(requests, sampling)

    def _wait_for_results(self, timeout: float) -> list[tuple[int, Future[list[str | ToolOutput]]]]:
        arrived: list[tuple[int, Future[list[str | ToolOutput]]]] = []
        deadline = time.monotonic() + timeout
        with suppress(queue.Empty):
            while len(arrived) < len(self._pending):
                arrived.append(self._with_results.get(timeout=max(deadline - time.monotonic(), 0.0)))
                deadline = min(deadline, time.monotonic() + GATHER_SECONDS)
        return arrived

    def _next_turn(self, sample_id: int) -> Request | None:
        """Returns the request for the next turn of a sample; None where the results exceed the token limit."""
        (request, sampling), pending = self._requests[sample_id], self._pending.pop(sample_id)
        sample = pending.sample
        names = [call.name for call in pending.calls]
        outputs = zip(names, pending.results.result(), strict=True)
        results = [self._format.result(name, output) for name, output in outputs]
        tokens = self._format.observation(sample.tokens[-1], results)
        if len(sample.tokens) + len(tokens) >= sampling.max_new_tokens:
            self._complete(replace(sample, finish="length"))
            return None
        images = tuple(image for result in results for image in result.images)
        return replace(request, partial=_with_observation(sample, tokens, images))


def _stopped(sample: Sample, sampling: Sampling) -> bool:
    """Returns whether the last token is one with which the policy ended a turn."""
    return sample.generated_mask[-1:] == (True,) and sample.tokens[-1] in sampling.stop_token_ids


def _num_turns(sample: Sample) -> int:
    """Counts the turns, which are separated by tool results."""
    return 1 + sum(not generated for generated, _ in groupby(sample.generated_mask))


def _turns_with_results(
    request: Request, sample: Sample, sampling: Sampling
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns the turns whose calls have results, without their end tokens, each with the tokens in front of it."""
    marked = zip(sample.tokens, sample.generated_mask, strict=True)
    runs = [tuple(token for token, _ in run) for _, run in groupby(marked, itemgetter(1))]
    # A turn that a stop string has ended has no end token.
    turns = [run[:-1] if run[-1] in sampling.stop_token_ids else run for run in runs[:-1:2]]
    return list(zip([request.prompt, *runs[1::2]], turns, strict=False))


def _with_observation(sample: Sample, tokens: tuple[int, ...], images: RowImages) -> Sample:
    """Appends tool results to a sample; its reports of fed tokens still end with the last one of these."""
    unscored = (0.0,) * len(tokens), (NOT_GENERATED,) * len(tokens)
    observation = Sample(sample.id, tokens, *unscored, "abort", images=images)
    return sample.extended_by(observation)
