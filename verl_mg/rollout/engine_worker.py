"""The worker that feeds one engine and collects its samples, and the events by which all ranks learn of its progress.

A worker serves queues, in their order: of a call, which ends when enough groups are complete, and an open one, to which
groups are appended without end. Slots that become free go to the first queue that has samples. What a queue of a call
goes through on one engine:

    served ──enough groups are complete──▶ draining ──none of its samples is in flight──▶ finished
      pops, submits, collects                aborted what is not needed,                     counts itself; the last
      |                                      collects partial samples                        engine announces the end
      +──it has no further samples, and none is in flight───────────────────────────────▶──+

The engine, whose process may end at any time:

    READY ──the process ends──▶ BARE ──the main threads of all ranks transfer weights──▶ LOADED ──▶ READY
      makes steps                 restarted, without weights; announced                     submits what was in
                                                                                            flight again

Threads of a rank that leads an engine in a process or servers; a rank without an engine has only a main thread:

    main thread: trains, and in between               thread "rollout" (`_run`)
    waits for an event, transfers weights             lets the main thread go first (`_wanted`)
    with `_lock` held, between two steps:             one step with `_lock`: pops, submits, collects for
      add, append, expect, discard, interrupt           COLLECT_SECONDS at most
      with stopped(): weights are updated             without work: sleeps until `_wake`, or IDLE_SECONDS

An engine in the rank's own process has no thread: the main thread, which would only wait, makes the steps (`work_off`).

Events are in a store that all ranks share: each rank sees all of them, in one order. A rank that waits for the next one
sends one request for that, however long it takes.

    count                number of events; adding 1 to it gives an event its number
    event/1, event/2     "restart 3": engine 3 runs again, without weights;  "end KEY": what is called KEY has ended
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

from torch.distributed import PrefixStore, Store

from verl_mg.distributed.collectives import GROUP_TIMEOUT
from verl_mg.engines.engine import LIMIT, LIMITED, EngineDiedError, Request, RolloutEngine, Sample
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.errors import UserError
from verl_mg.rollout.groups import Group
from verl_mg.rollout.request_limit import RequestLimit
from verl_mg.rollout.work_queue import WorkQueue

COLLECT_SECONDS = 0.05  # longest wait for samples before the worker looks at other things again
IDLE_SECONDS = 0.02  # pause of a worker whose engine has nothing to do
# Interval at which an engine reads the counters of a call; shorter in the first 5 seconds of the call.
POLL_SECONDS = 0.25
POLL_FRACTION = 0.05  # interval as a fraction of the call's time so far, up to POLL_SECONDS
REQUESTS_PER_POLL = 1  # requests to the store of one reading
# Limit of these requests of all engines together, for one store: above 250 engines the interval is longer.
MAX_REQUESTS_PER_SECOND = 1000
MAX_DEATHS = 3  # an engine that dies this often in one call ends the job
# Starts in a row without a complete sample that end the job. Fewer than MAX_DEATHS, since each takes minutes and ends
# alike where the engine cannot compute a batch; they are counted over all calls.
MAX_FAILED_STARTS = 2
RESTART, END = "restart", "end"  # kinds of event
# Generated tokens, deaths of the engine, and seconds with and without samples.
COUNTS = ("tokens", "deaths", "busy", "idle")


def poll_seconds(num_engines: int) -> float:
    """Returns the longest interval between two readings of the counters by one engine, in seconds."""
    return max(POLL_SECONDS, num_engines * REQUESTS_PER_POLL / MAX_REQUESTS_PER_SECOND)


class EngineEvents:
    """The events of a job as one rank sees them. Any thread can announce them; one thread waits for them."""

    def __init__(self, store: Store) -> None:
        self._store = PrefixStore("engine_events", store)
        # While a thread waits for a key its connection is blocked.
        self._waiting_store = PrefixStore("engine_events", store.clone())  # type: ignore[attr-defined]
        self._num_seen = 0
        self._ended: set[str] = set()

    def announce_restart(self, engine: int) -> None:
        """Announces that an engine runs again, without weights."""
        self._append(f"{RESTART} {engine}")

    def announce_end(self, what: str) -> None:
        """Announces that a call has ended on all engines, or that an open queue is as far as expected."""
        self._append(f"{END} {what}")

    def has_ended(self, what: str) -> bool:
        """Returns whether this rank has seen the announcement of an end."""
        return what in self._ended

    def unseen_restarts(self) -> Iterator[int]:
        """Yields the engines that were restarted since this rank looked last."""
        # Adding 0 reads the counter, also before the first event. The text of a counted event may arrive later.
        while self._num_seen < self._store.add("count", 0):
            yield from self.wait()

    def wait(self) -> list[int]:
        """Waits for the next event; returns the engine if one was restarted, else nothing."""
        key = f"event/{self._num_seen + 1}"
        self._waiting_store.wait([key], GROUP_TIMEOUT)  # a week: the watchdog ends a stalled job
        kind, _, value = self._waiting_store.get(key).decode().partition(" ")
        self._num_seen += 1
        if kind == RESTART:
            return [int(value)]
        self._ended.add(value)
        return []

    def _append(self, event: str) -> None:
        self._store.set(f"event/{self._store.add('count', 1)}", event)


class EngineRestart:
    """Restart of the engine in a process that this rank leads; `sleeps`: the engine shares its device with roles."""

    def __init__(self, engine: ProcessEngine, number: int, sleeps: bool, events: EngineEvents) -> None:
        self._engine, self.number, self._sleeps, self._events = engine, number, sleeps, events

    def restart(self) -> None:
        """Starts the process again, without weights, and announces it; EngineDiedError if it ends again."""
        self._engine.restart()
        if self._sleeps:
            self._engine.sleep(weights=False, kv=True)  # the actor's weights have its place during the transfer
        self._events.announce_restart(self.number)

    def resume(self) -> None:
        """Submits the requests again that were in flight."""
        self._engine.resume()

    def forget(self) -> None:
        """Leaves the requests that were in flight out of the next `resume`."""
        self._engine.take_unfinished()


class EngineState(Enum):
    """State of an engine, see the drawing above."""

    READY = auto()
    BARE = auto()
    LOADED = auto()


@dataclass(frozen=True)
class _InFlight:
    queue: WorkQueue
    oldest: int
    """Version of the oldest token that the sample can have."""


class EngineWorker:
    """Serves queues on the engine that this rank leads; on a rank without one it does nothing.

    `request_of` makes the request of a sample. `on_sample` gets each complete sample and `on_abort` each that was
    aborted, in the thread that makes the step. `restart` is None for engines without a process of this rank's. With
    `longest`, the most tokens of a sample and its prompt, the number of samples in flight follows the engine's load.
    """

    def __init__(
        self,
        engine: RolloutEngine | None,
        num_engines: int,
        events: EngineEvents,
        request_of: Callable[[int], Request],
        on_sample: Callable[[Sample], None],
        on_abort: Callable[[Sample], None],
        restart: EngineRestart | None = None,
        longest: int | None = None,
    ) -> None:
        self._engine, self._num_engines, self._events, self._restart = engine, num_engines, events, restart
        self._request_of, self._on_sample, self._on_abort = request_of, on_sample, on_abort
        self._lock = threading.RLock()  # guards everything below; held by the thread during a step
        # Held by the main thread while it waits for the lock, which it gets after the current step. Without it the
        # thread, which releases the lock only for a moment, could take it again first.
        self._wanted = threading.RLock()
        self._wake = threading.Event()
        self._state = EngineState.READY
        self._queues: list[WorkQueue] = []
        self._draining: set[WorkQueue] = set()
        self._expected = ""  # event of the open queue that is announced when the queue is done; "" for none
        self._resumed: dict[int, WorkQueue] = {}  # aborted samples that this rank continues, before all others
        self._in_flight: dict[int, _InFlight] = {}
        self._discarded: set[int] = set()
        self._started_at = self._next_poll_at = time.monotonic()
        self._num_deaths_of_call = 0
        self._num_failed_starts = 0
        self._has_completed = False  # whether a sample is complete since the engine was started
        self._counts: dict[str, float] = dict.fromkeys(COUNTS, 0)
        self._longest = longest
        self._limit: RequestLimit | None = None
        self._closed = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self.version = -1  # of the engine's weights; set while stopped

    # -- called by the main thread

    def start(self) -> None:
        """Starts the thread, once; the engine has weights."""
        if self._engine is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._engine,), name="rollout", daemon=True)
            self._thread.start()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the worker after its current step for the time of the block; the engine continues."""
        with self._wanted, self._lock:
            if self._error is not None:
                raise self._error
            yield

    def check(self) -> None:
        """Raises the error that has ended the thread, if one has."""
        with self.stopped():
            pass

    def add(self, queue: WorkQueue, resumed: Iterable[int] = ()) -> None:
        """Serves a queue, before those that are served already; this rank continues the samples in `resumed`."""
        if self._engine is None:
            return
        with self.stopped():
            self._queues.insert(0, queue)
            self._resumed |= dict.fromkeys(resumed, queue)
            self._num_deaths_of_call = 0
            self._started_at = self._next_poll_at = time.monotonic()
        self._wake.set()

    def work_off(self, queue: WorkQueue) -> None:
        """Makes the steps of a call, in the main thread, until the queue is finished on this rank's engine."""
        # Consumes samples of the queue; waits in `collect`, or IDLE_SECONDS; ends when the queue is finished.
        while self._engine is not None and queue in self._queues:
            with self._lock:
                is_busy = self._step(self._engine)
            if not is_busy:
                time.sleep(IDLE_SECONDS)

    def append(self, queue: WorkQueue, groups: Iterable[Group], resumed: Iterable[int]) -> None:
        """Appends groups to an open queue, the same ones on all ranks; this rank continues the samples in `resumed`."""
        if self._engine is None:
            return
        with self.stopped():
            queue.append(groups)
            self._resumed |= dict.fromkeys(resumed, queue)
        self._wake.set()

    def expect(self, queue: WorkQueue, num_groups: int, event: str) -> None:
        """Announces an event when an open queue has completed a number of groups on all engines; all ranks call it."""
        if self._engine is None:
            return
        with self.stopped():
            self._num_deaths_of_call = 0
            queue.expect(num_groups)
            queue.refresh()
            self._expected = event
            self._announce(queue)

    @property
    def num_slots(self) -> int:
        """Largest number of samples in flight by the load of the engine; 0 without one, or before its start."""
        return self._limit.value if self._limit else 0

    def in_flight_versions(self) -> list[tuple[int, int]]:
        """Returns (sample, version of the oldest token that it can have) of the samples in flight; while stopped."""
        return [(i, flight.oldest) for i, flight in self._in_flight.items()]

    def discard(self, samples: Collection[int]) -> None:
        """Aborts and forgets samples, as far as they are in flight; called while stopped."""
        self._resumed = {i: queue for i, queue in self._resumed.items() if i not in samples}
        # Still in flight until the engine returns them; `_store_results` drops them then.
        self._discarded |= self._in_flight.keys() & set(samples)
        if self._engine is not None and self._discarded:
            self._engine.abort_samples(self._discarded)

    def interrupt(self) -> None:
        """Aborts the samples in flight, which continue with the next step; `on_abort` gets them. Called while stopped.

        An engine that cannot continue its samples is not interrupted.
        """
        if self._engine is None or not self._engine.continues_aborted or self._state is not EngineState.READY:
            return
        self._engine.abort()
        try:
            # Consumes samples, complete or aborted; ends when nothing is in flight, or the engine dies.
            while self._in_flight:
                samples = self._engine.collect(COLLECT_SECONDS)
                queues = {sample.id: self._in_flight[sample.id].queue for sample in samples}
                self._resumed |= {i: queues[i] for i in self._store_results(samples, is_drained=True)}
        except EngineDiedError as error:  # then all that is left in flight begins again
            self._recover(error)
        self._wake.set()

    def weights_arrived(self, engine: int) -> None:
        """Continues, if `engine` is this rank's, which was restarted and has received weights."""
        if self._restart is not None and engine == self._restart.number and self._state is EngineState.BARE:
            self._state = EngineState.LOADED
            self._wake.set()

    def take_counts(self) -> dict[str, float]:
        """Returns what the engine has done since the last call, by the names in COUNTS and its own counters."""
        with self.stopped():
            if self._engine is not None:
                self._observe(self._engine)
            counts, self._counts = self._counts, dict.fromkeys(COUNTS, 0)
            return counts

    def close(self) -> None:
        """Ends the thread; the engine stays as it is."""
        with self._wanted, self._lock:
            self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    # -- steps

    def _run(self, engine: RolloutEngine) -> None:
        try:
            # Consumes samples of the queues and of the engine; waits in `collect`, or for `_wake`; ends by `close`, or
            # by an error.
            while not self._closed:
                started = time.perf_counter()
                with self._wanted:
                    pass  # the main thread goes first
                with self._lock:
                    is_busy, has_work = self._step(engine), bool(self._queues)
                if not is_busy:
                    self._wake.wait(IDLE_SECONDS if has_work else None)
                    self._wake.clear()
                    with self._lock:
                        self._counts["idle"] += time.perf_counter() - started
        except Exception as error:
            self._error = error  # raised by the next call of the main thread
            self._events.announce_end(f"error {id(self)}")  # wakes a main thread that waits for events

    def _step(self, engine: RolloutEngine) -> bool:
        """Submits and collects; returns whether samples are in flight."""
        started, is_busy = time.perf_counter(), False
        try:
            if self._state is EngineState.LOADED:
                self._resume(engine)
            if self._state is EngineState.BARE:
                return False
            self._poll()
            resumed, self._resumed = self._resumed, {}
            for queue in self._queues:
                self._submit([i for i in resumed if resumed[i] is queue], queue, engine)
            for queue in self._queues:
                if queue.is_open or not queue.is_done():
                    self._submit(queue.pop(max(0, self._num_free_slots(queue, engine))), queue, engine)
            is_busy = bool(self._in_flight)
            if is_busy:
                samples = engine.collect(COLLECT_SECONDS)
                self._observe(engine)
                self._store_results(samples)
                self._counts["busy"] += time.perf_counter() - started
            for queue in list(self._queues):
                if queue.is_open:
                    self._announce(queue)
                elif queue.is_done() or (queue.is_exhausted() and not self._has_in_flight(queue)):
                    self._end(queue, engine)
        except EngineDiedError as error:
            self._recover(error)
        return is_busy

    def _num_free_slots(self, queue: WorkQueue, engine: RolloutEngine) -> int:
        if self._longest is None:
            return engine.num_free_slots() + (engine.num_queue_slots() if queue.can_queue(self._num_engines) else 0)
        if self._limit is None and (cache_tokens := engine.num_cache_tokens()):  # servers have one when they are ready
            self._limit = RequestLimit(cache_tokens, self._longest)
        return min(self.num_slots - len(self._in_flight), engine.num_free_slots())

    def _observe(self, engine: RolloutEngine) -> None:
        """Adds the engine's counters to the worker's, and sets the limit by them."""
        counts = dict(engine.take_counts())
        # Samples that are complete were part of this load, and are in flight until they are stored.
        if self._limit and (state := self._limit.observe(counts, self._in_flight)):
            counts |= {LIMITED: 1, LIMIT: self._limit.value, state.value: 1}
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0) + count

    def _poll(self) -> None:
        """Reads the counters of calls, if the last reading is old enough."""
        now = time.monotonic()
        if now >= self._next_poll_at:
            interval = min(poll_seconds(self._num_engines), POLL_FRACTION * (now - self._started_at))
            self._next_poll_at = now + interval
            for queue in self._queues:
                # The engine that completes the expected group of an open queue knows it by itself.
                if not queue.is_open:
                    queue.refresh()

    def _submit(self, samples: Collection[int], queue: WorkQueue, engine: RolloutEngine) -> None:
        requests = [self._request_of(i) for i in samples]
        for request in requests:
            # The staleness of a sample counts from its oldest token, which a continuation keeps.
            written = request.partial.generated_versions if request.partial else ()
            oldest = min(written, default=self.version)
            self._in_flight[request.id] = _InFlight(queue, oldest)
        if requests:
            engine.submit(requests, queue.sampling)

    def _store_results(self, samples: Iterable[Sample], is_drained: bool = False) -> list[int]:
        """Passes on samples that the engine has returned; returns those that were aborted."""
        aborted: list[int] = []
        done: dict[WorkQueue, list[int]] = {}
        for sample in samples:
            queue = self._in_flight.pop(sample.id).queue
            if sample.id in self._discarded:
                self._discarded.remove(sample.id)
            elif sample.finish == "abort" and (is_drained or queue in self._draining):
                self._on_abort(sample)
                aborted.append(sample.id)
            else:
                self._has_completed = True
                self._counts["tokens"] += len(sample.generated_versions)
                self._on_sample(sample)
                done.setdefault(queue, []).append(sample.id)
        for queue, ids in done.items():
            queue.mark_done(ids)
        return aborted

    def _has_in_flight(self, queue: WorkQueue) -> bool:
        return any(flight.queue is queue for flight in self._in_flight.values())

    def _announce(self, queue: WorkQueue) -> None:
        if self._expected and queue.is_done():
            event, self._expected = self._expected, ""
            if queue.is_first_to_see(event):  # several engines see the count
                self._events.announce_end(event)

    def _end(self, queue: WorkQueue, engine: RolloutEngine) -> None:
        """Drains a queue of a call that is done; when nothing of it is in flight, it is finished on this engine."""
        if self._has_in_flight(queue):
            if queue not in self._draining:
                self._draining.add(queue)
                engine.abort()  # only in calls of training, which have the engine for themselves
            return
        self._queues.remove(queue)
        self._draining.discard(queue)
        # Exactly one engine sees the last count, so the end is announced once.
        if queue.count_end() == self._num_engines:
            self._events.announce_end(queue.key)

    # -- engines that died

    def _recover(self, error: EngineDiedError) -> None:
        """Restarts the engine; its samples are generated again as soon as it has weights."""
        if self._restart is None:
            raise error
        self._counts["deaths"] += 1
        self._num_deaths_of_call += 1  # a restart that fails counts too
        self._num_failed_starts = 0 if self._has_completed else self._num_failed_starts + 1
        self._has_completed = False
        if self._num_failed_starts == MAX_FAILED_STARTS:
            raise UserError(
                f"rollout: the engine ended {MAX_FAILED_STARTS} times in a row before it completed a sample. "
                f"Correct what its last lines say, or choose another rollout.engine: {error}"
            ) from error
        if self._num_deaths_of_call == MAX_DEATHS:
            raise UserError(f"rollout: the engine died {MAX_DEATHS} times in one call: {error}.") from error
        self._state = EngineState.BARE
        try:
            self._restart.restart()
        except EngineDiedError as again:
            self._recover(again)

    def _resume(self, engine: RolloutEngine) -> None:
        assert self._restart is not None
        if not engine.health():
            raise EngineDiedError("the engine ended again before it had its weights")
        self._state = EngineState.READY
        self._restart.resume()
        # What was in flight of a draining queue was submitted again, of which no more tokens are needed.
        if self._draining:
            engine.abort()
