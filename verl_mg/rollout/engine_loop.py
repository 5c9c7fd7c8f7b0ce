"""The generation loop of one rank in one call: pops requests, collects samples, restarts engines that died.

States of the loop; a rank without an engine is finished from the start:

    generating --enough groups are complete--> draining --nothing in flight--> finished --end of the call--> returns
      pops, submits,                             has aborted everything,         waits for events: restarts of
      collects                                   collects partial samples        engines, and the end of the call
           |                                        |
           +------ the engine died: restart, weights from all ranks, its requests again; then as before

The last engine that finishes announces the end. Between `start_background` and `run` a thread makes the steps, and only
it uses the engine and the queue; it ends when `run` stops it, or with an error, which `run` handles.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch.distributed import Store

from verl_mg.engines.engine import EngineDiedError, Request, RolloutEngine, Sample, Sampling
from verl_mg.errors import UserError
from verl_mg.rollout.engine_events import EngineEvents
from verl_mg.rollout.work_queue import WorkQueue

COLLECT_SECONDS = 0.05  # longest wait for samples before the loop looks at other things again
IDLE_SECONDS = 0.02  # pause of a loop that has nothing to do
# Interval at which an engine reads the counters of all engines; shorter in the first 5 seconds of a call.
POLL_SECONDS = 0.25
POLL_FRACTION = 0.05  # interval as a fraction of the call's time so far, up to POLL_SECONDS
REQUESTS_PER_POLL = 2  # requests to the store of one reading: counters of the queue, and events
# Limit of these requests of all engines together, for one store: above 125 engines the interval is longer.
MAX_REQUESTS_PER_SECOND = 1000
MAX_DEATHS = 3  # an engine that dies this often in one call ends the job


class EngineRecovery(Protocol):
    """Restart of an engine whose process ended: all ranks transfer weights to it, since each has a part of them."""

    events: EngineEvents  # restarts and ends of calls

    def restart_engine(self) -> None:
        """Restarts this rank's engine, announces it to the other ranks, and submits its unfinished requests again."""
        ...

    def recover(self, engine: int) -> None:
        """Transfers weights to an engine that was restarted; all ranks call it together."""
        ...


def poll_seconds(num_engines: int) -> float:
    """Returns the longest interval between two readings of the counters by one engine, in seconds."""
    return max(POLL_SECONDS, num_engines * REQUESTS_PER_POLL / MAX_REQUESTS_PER_SECOND)


@dataclass
class EngineLoopResult:
    """Samples that the engine of this rank generated in one call."""

    completed: dict[int, Sample] = field(default_factory=dict)  # complete samples by id
    aborted: dict[int, Sample] = field(default_factory=dict)  # partial ones, in flight when enough groups were complete
    num_deaths: int = 0
    num_tokens: int = 0  # tokens that the policy generated
    busy_seconds: float = 0.0  # seconds with requests in flight


class EngineLoop:
    """Runs on every rank in each call; ranks without an engine wait, and help to recover engines of others.

    `start`, then `run`. In between, `start_background` continues in a thread while the rank does something else; so
    `on_sample`, called with each complete sample, may run there.
    """

    def __init__(
        self,
        engine: RolloutEngine | None,
        num_engines: int,
        queue: WorkQueue,
        store: Store,
        key: str,
        recovery: EngineRecovery,
        on_sample: Callable[[Sample], None] = lambda sample: None,
    ) -> None:
        self._engine, self._num_engines, self._queue, self._recovery = engine, num_engines, queue, recovery
        self._on_sample = on_sample
        self._store, self._key, self._num_finished_key = store, key, f"{key}/engines finished"
        self._started_at = self._next_poll_at = time.monotonic()
        self._in_flight = 0
        self._draining = False
        self._finished = engine is None
        self._result = EngineLoopResult()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: Exception | None = None

    def start(
        self, partial_requests: Sequence[Request], request_of: Callable[[int], Request], sampling: Sampling
    ) -> None:
        """Submits the samples that this rank resumes; samples from the queue follow."""
        self._request_of, self._sampling = request_of, sampling
        if self._engine is not None:
            self._submit(list(partial_requests))

    def start_background(self) -> None:
        """Continues in a thread until `run` takes over."""
        if self._engine is not None:
            self._thread = threading.Thread(target=self._run_background, args=(self._engine,), daemon=True)
            self._thread.start()

    def run(self) -> EngineLoopResult:
        """Returns when enough groups are complete and all engines have stopped."""
        self._join_background_thread()
        events = self._recovery.events
        # Consumes samples of the engine and events. Waits for samples (`_step`), when finished for the next event; ends
        # by the event of the call's end.
        while not events.has_ended(self._key):
            if self._engine is None or self._finished:
                self._recover_engines(events.wait())
                continue
            if time.monotonic() >= self._next_poll_at:  # `_step` reads the other counters then
                self._recover_engines(events.unseen_restarts())
            try:
                self._step(self._engine)
            except EngineDiedError as error:
                self._recover(error)
        return self._result

    def _recover_engines(self, engines: Iterable[int]) -> None:
        for engine in engines:
            self._recovery.recover(engine)

    def _run_background(self, engine: RolloutEngine) -> None:
        try:
            # Consumes samples; polls between steps; ends when the engine is finished or `run` takes over.
            while not (self._finished or self._stop.is_set()):
                self._step(engine)
        except Exception as error:
            self._error = error  # recovery of a dead engine needs all ranks: `run` does it

    def _join_background_thread(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()
        if isinstance(self._error, EngineDiedError):
            self._recover(self._error)
        elif self._error:
            raise self._error

    def _step(self, engine: RolloutEngine) -> None:
        started = time.perf_counter()
        self._poll()
        if not self._draining:
            queue_slots = engine.num_queue_slots() if self._queue.can_queue(self._num_engines) else 0
            samples = self._queue.pop(max(0, engine.num_free_slots() + queue_slots))
            self._submit([self._request_of(sample) for sample in samples])
        if self._in_flight:
            for sample in engine.collect(COLLECT_SECONDS):
                self._in_flight -= 1
                self._store_result(sample)
            self._result.busy_seconds += time.perf_counter() - started
        else:
            time.sleep(IDLE_SECONDS)
        if not self._draining and self._queue.is_done():
            self._draining = True
            if self._in_flight:
                engine.abort()
        if self._draining and not self._in_flight:
            self._finished = True
            # Exactly one engine sees the last count, so the end is announced once.
            if self._store.add(self._num_finished_key, 1) == self._num_engines:
                self._recovery.events.announce_end(self._key)

    def _poll(self) -> None:
        """Reads the queue's counters, if the last reading is old enough."""
        now = time.monotonic()
        if now >= self._next_poll_at:
            interval = min(poll_seconds(self._num_engines), POLL_FRACTION * (now - self._started_at))
            self._next_poll_at = now + interval
            self._queue.refresh()

    def _submit(self, requests: list[Request]) -> None:
        if requests and self._engine is not None:
            self._in_flight += len(requests)
            self._engine.submit(requests, self._sampling)

    def _store_result(self, sample: Sample) -> None:
        if self._draining and sample.finish == "abort":
            self._result.aborted[sample.id] = sample
            return
        self._result.completed[sample.id] = sample
        self._result.num_tokens += len(sample.generated_versions)
        self._queue.mark_done(sample.id)
        self._on_sample(sample)

    def _recover(self, error: EngineDiedError) -> None:
        self._result.num_deaths += 1  # a restart that fails counts too
        if self._result.num_deaths == MAX_DEATHS:
            raise UserError(f"rollout: the engine died {MAX_DEATHS} times in one call: {error}.") from error
        try:
            self._recovery.restart_engine()
        except EngineDiedError as again:
            self._recover(again)
            return
        # The restart has submitted what was in flight again, of which a draining loop wants no more tokens.
        if self._draining and self._engine is not None:
            self._engine.abort()
