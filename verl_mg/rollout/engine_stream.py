"""The generation loop of one rank's engine in asynchronous rollouts: a thread that generates without pause.

    thread "rollout" (`_run`)                                main thread of the rank: trains, and in between
    lets the main thread go first (`_wanted`)                waits for `_lock`, holding `_wanted`
    one step with `_lock`: pops, submits, collects           with `_lock` held, between two steps of the thread:
      for COLLECT_SECONDS at most, stores samples              stream.append(groups), stream.take(samples)
    idle: IDLE_SECONDS without `_lock`                         with stream.stopped(): weights are updated
    engine died: restart; no steps until it has weights        stream.drain(), .snapshot(), then .resubmit()

`stopped` stops the thread, not the engine:

    stream.append(groups)                 work for whichever engine has free slots
    stream.announce(key, count)           an event when `count` groups were completed on all engines together
    with stream.stopped(): ...            only the main thread uses the engine
    stream.drain(), stream.resubmit()     aborts the samples in flight; continues them
    stream.snapshot(), stream.resubmit()  what a checkpoint contains; the samples in flight continue
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch.distributed import Store

from verl_mg.engines.engine import EngineDiedError, Request, RolloutEngine, Sample, Sampling
from verl_mg.errors import UserError
from verl_mg.rollout.engine_events import EngineEvents
from verl_mg.rollout.engine_loop import COLLECT_SECONDS, MAX_DEATHS
from verl_mg.rollout.work_queue import Group, StreamingWorkQueue

IDLE_SECONDS = 0.01  # pause of a thread whose engine has nothing to do or waits for weights


class EngineStream:
    """Continuous generation on the engine that this rank leads, or the view of a rank without one.

    `restart` starts the engine's process without weights; `resume` submits what was in flight to it again. `on_sample`
    is called in the thread.
    """

    def __init__(
        self,
        engine: RolloutEngine | None,
        queue: StreamingWorkQueue,
        store: Store,
        events: EngineEvents,
        restart: Callable[[], None],
        resume: Callable[[], None],
        request_of: Callable[[int], Request],
        on_sample: Callable[[Sample], None],
        sampling: Sampling,
    ) -> None:
        self._engine, self._queue, self._store, self._events = engine, queue, store, events
        self._restart, self._resume, self._request_of, self._on_sample = restart, resume, request_of, on_sample
        self._sampling = sampling
        self._lock = threading.RLock()  # guards everything below and the queue; held by the thread during a step
        # Held by the main thread while it waits for the lock, which it gets after the current step. Without it the
        # thread, which releases the lock only for a moment, could take it again first.
        self._wanted = threading.RLock()
        self._in_flight: dict[int, int] = {}  # version of the oldest token that each unfinished sample can have
        self._completed: dict[int, Sample] = {}
        self._discarded: set[int] = set()
        self._resumed: list[Request] = []
        self._announced: tuple[str, int] | None = None
        self._needs_weights = self._closed = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._version = -1
        self.num_deaths = 0  # number of times that the engine died since the last `announce`
        self.num_tokens = 0
        self.idle_seconds = 0.0  # seconds in which the engine had nothing to do

    def start(self) -> None:
        """Starts the thread, once; the engine has weights."""
        if self._engine is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._engine,), name="rollout", daemon=True)
            self._thread.start()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the thread after its current step for the time of the block; the engine continues."""
        with self._wanted, self._lock:
            if self._error is not None:
                raise self._error
            yield

    def check(self) -> None:
        """Raises the error that has ended the thread, if one has."""
        with self.stopped():
            pass

    def append(self, groups: Iterable[Group]) -> None:
        """Appends groups of samples; all ranks append the same ones."""
        with self.stopped():
            self._queue.append(groups)

    def resume_partial(self, requests: Iterable[Request]) -> None:
        """Submits samples that were aborted in an earlier run, and of which this rank has the tokens."""
        with self.stopped():
            self._resumed += requests

    def set_version(self, version: int) -> None:
        """Sets the version of the engine's weights; called while stopped."""
        self._version = version

    def announce(self, key: str, count: int) -> None:
        """Announces an event as soon as `count` groups were completed on all engines together; all ranks call it."""
        if self._engine is not None:
            with self.stopped():
                self.num_deaths = 0
                self._announced = (key, count)
                self._queue.refresh()
                self._announce_if_complete()

    def oldest_versions(self) -> dict[int, int]:
        """Returns the version of the oldest token of each complete sample of this rank's engine."""
        with self.stopped():
            return {i: oldest_version(sample, self._version) for i, sample in self._completed.items()}

    def in_flight_versions(self) -> dict[int, int]:
        """Returns the version of the oldest token that each unfinished sample can have; called while stopped."""
        return dict(self._in_flight)

    def take(self, samples: Collection[int]) -> dict[int, Sample]:
        """Removes and returns the samples among `samples` that this rank's engine has completed; forgets the others."""
        with self.stopped():
            self._queue.forget(samples)
            return {i: self._completed.pop(i) for i in samples if i in self._completed}

    def discard(self, samples: Collection[int]) -> None:
        """Drops samples, also those in flight, which are aborted; called while stopped."""
        self._queue.forget(samples)
        for i in samples:
            self._completed.pop(i, None)
        # Still in flight until the engine returns them; `_store_result` drops them then.
        self._discarded |= self._in_flight.keys() & set(samples)
        if self._engine is not None and self._discarded:
            self._engine.abort_samples(self._discarded)

    def snapshot(self) -> tuple[dict[int, Sample], dict[int, Sample]]:
        """Returns the complete samples, and the partial ones with at least one token, by id.

        Called while stopped, and followed by `resubmit`. An engine that cannot continue its samples is not
        interrupted: those in flight begin again in a run that resumes from the snapshot, not in this one.
        """
        can_continue = self._engine is None or self._engine.continues_aborted
        partial = self.drain() if can_continue else {}
        return dict(self._completed), partial

    def drain(self) -> dict[int, Sample]:
        """Aborts all samples in flight, and returns the partial ones with at least one token; see `snapshot`."""
        partial: dict[int, Sample] = {}
        if self._engine is not None and not self._needs_weights:
            self._engine.abort()
            try:
                # Consumes samples, complete or aborted; ends when nothing is in flight, or the engine dies.
                while self._in_flight:
                    for sample in self._engine.collect(COLLECT_SECONDS):
                        if self._in_flight.get(sample.id) is not None and sample.finish == "abort":
                            del self._in_flight[sample.id]
                            if sample.id not in self._discarded:
                                self._resumed.append(self._continuation(sample))
                                partial |= {sample.id: sample} if sample.tokens else {}
                            self._discarded.discard(sample.id)
                        else:
                            self._store_result(sample)
            except EngineDiedError as error:  # then all that is left in flight begins again
                self._recover(error)
        return partial

    def resubmit(self) -> None:
        """Submits the samples again that `drain` aborted; called while stopped."""
        self._submit_resumed()

    def close(self) -> None:
        """Ends the thread; the engine stays as it is."""
        with self._wanted, self._lock:
            self._closed = True
        if self._thread is not None:
            self._thread.join()

    def _run(self, engine: RolloutEngine) -> None:
        try:
            # Consumes groups of the queue and samples of the engine; waits in `collect`, or IDLE_SECONDS; ends by
            # `close`, or by an error.
            while not self._closed:
                with self._wanted:
                    pass  # the main thread goes first
                with self._lock:
                    is_idle = not self._step(engine)
                if is_idle:
                    time.sleep(IDLE_SECONDS)
        except Exception as error:
            self._error = error  # raised by the next call of the main thread
            self._events.announce_end(f"error {id(self)}")  # wakes a main thread that waits for events

    def _step(self, engine: RolloutEngine) -> bool:
        """Submits and collects; returns whether there was something to do."""
        started = time.perf_counter()
        try:
            if self._needs_weights:
                if not engine.health():  # the main thread transfers them, between two steps
                    return False
                self._needs_weights = False
                self._resume()
            self._submit_resumed()
            self._submit([self._request_of(i) for i in self._queue.pop(max(0, engine.num_free_slots()))])
            if self._in_flight:
                for sample in engine.collect(COLLECT_SECONDS):
                    self._store_result(sample)
                return True
        except EngineDiedError as error:
            self._recover(error)
        self.idle_seconds += IDLE_SECONDS + time.perf_counter() - started
        return False

    def _submit_resumed(self) -> None:
        resumed, self._resumed = self._resumed, []
        self._submit(resumed)

    def _submit(self, requests: list[Request]) -> None:
        if requests and self._engine is not None:
            for request in requests:
                # The staleness of a sample counts from its oldest token, which a continuation keeps.
                oldest = oldest_version(request.partial, self._version) if request.partial else self._version
                self._in_flight[request.id] = oldest
            self._engine.submit(requests, self._sampling)

    def _store_result(self, sample: Sample) -> None:
        del self._in_flight[sample.id]
        if sample.id in self._discarded:
            self._discarded.remove(sample.id)
            return
        self._completed[sample.id] = sample
        self.num_tokens += len(sample.generated_versions)
        self._on_sample(sample)
        self._queue.mark_done(sample.id)
        self._announce_if_complete()

    def _announce_if_complete(self) -> None:
        if self._announced is not None and self._queue.num_complete >= self._announced[1]:
            key, self._announced = self._announced[0], None
            if self._store.add(f"announced/{key}", 1) == 1:  # several engines see the count
                self._events.announce_end(key)

    def _continuation(self, sample: Sample) -> Request:
        return replace(self._request_of(sample.id), partial=sample if sample.tokens else None)

    def _recover(self, error: EngineDiedError) -> None:
        """Restarts the engine; its samples are generated again as soon as it has weights."""
        self.num_deaths += 1
        if self.num_deaths == MAX_DEATHS:
            raise UserError(f"rollout: the engine died {MAX_DEATHS} times in one call: {error}.") from error
        self._needs_weights = True
        try:
            self._restart()
        except EngineDiedError as again:
            self._recover(again)


def oldest_version(sample: Sample, default: int) -> int:
    """Returns the version of the oldest token of a sample, `default` without generated tokens."""
    return min(sample.generated_versions, default=default)
