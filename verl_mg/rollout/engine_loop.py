"""One call's work on one rank: requests dealt to its engine, samples taken from it, deaths of engines survived."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch.distributed import Store

from verl_mg.errors import UserError
from verl_mg.rollout.engine import EngineDiedError, Request, RolloutEngine, Sample, Sampling
from verl_mg.rollout.work_queue import WorkQueue

COLLECT_SECONDS = 0.05
IDLE_SECONDS = 0.02
DEATHS_BEFORE_GIVING_UP = 3


class EngineRecovery(Protocol):
    """How an engine whose process ended comes back: all ranks bring the weights, since all hold some."""

    def revive(self) -> None:
        """On the rank of the engine: start it anew, tell the others, and go on with what was unfinished."""
        ...

    def serve(self) -> None:
        """On every rank, again and again while samples are drawn: take part where an engine was started anew."""
        ...


@dataclass
class EngineLoopResult:
    """What one rank's engine did: samples that are done, samples that were cut, and how much that was."""

    done: dict[int, Sample] = field(default_factory=dict)
    cut: dict[int, Sample] = field(default_factory=dict)
    deaths: int = 0
    tokens: int = 0
    busy_seconds: float = 0.0


class EngineLoop:
    """Every rank runs one in each call; those without an engine wait, and help to bring an engine back.

    `begin`, then `run`. Between the two `ahead` may work in a thread, where engines have ranks of their own.
    """

    def __init__(
        self,
        engine: RolloutEngine | None,
        engines: int,
        deal: WorkQueue,
        store: Store,
        key: str,
        rescue: EngineRecovery,
        finished: Callable[[Sample], None] = lambda sample: None,
    ) -> None:
        """Args: finished: told of each sample as soon as it is whole, while others are still being written."""
        self._engine, self._engines, self._deal, self._rescue = engine, engines, deal, rescue
        self._tell = finished
        self._store, self._handed_in = store, f"{key}/handed in"
        self._in_flight = 0
        self._cutting = False
        self._finished = engine is None
        self._work = EngineLoopResult()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._error: Exception | None = None

    def begin(self, begun: Sequence[Request], request_of: Callable[[int], Request], sampling: Sampling) -> None:
        """Give the engine what was `begun` earlier; what the deal gives comes next."""
        self._request_of, self._sampling = request_of, sampling
        if self._engine is not None:
            self._submit(list(begun))

    def ahead(self) -> None:
        """Work in a thread while this rank does something else, until `run` goes on."""
        if self._engine is not None:
            self._thread = threading.Thread(target=self._work_ahead, args=(self._engine,), daemon=True)
            self._thread.start()

    def run(self) -> EngineLoopResult:
        """Until enough groups are complete and all engines have stopped."""
        self._take_over()
        while self._store.add(self._handed_in, 0) < self._engines:
            self._rescue.serve()
            if self._engine is None or self._finished:
                time.sleep(IDLE_SECONDS)
                continue
            try:
                self._advance(self._engine)
            except EngineDiedError as error:
                self._survive(error)
        return self._work

    def _work_ahead(self, engine: RolloutEngine) -> None:
        try:
            while not (self._finished or self._stopped.is_set()):
                self._advance(engine)
        except Exception as error:
            self._error = error  # a dead engine needs all ranks to come back: `run` sees to it

    def _take_over(self) -> None:
        self._stopped.set()
        if self._thread:
            self._thread.join()
        if isinstance(self._error, EngineDiedError):
            self._survive(self._error)
        elif self._error:
            raise self._error

    def _advance(self, engine: RolloutEngine) -> None:
        started = time.perf_counter()
        if not self._cutting:
            ahead = engine.num_queue_slots() if self._deal.plenty(self._engines) else 0
            fresh = self._deal.take(max(0, engine.num_free_slots() + ahead))
            self._submit([self._request_of(sample) for sample in fresh])
        if self._in_flight:
            for sample in engine.collect(COLLECT_SECONDS):
                self._in_flight -= 1
                self._put_away(sample)
            self._work.busy_seconds += time.perf_counter() - started
        else:
            time.sleep(IDLE_SECONDS)
        if not self._cutting and self._deal.over():
            self._cutting = True
            if self._in_flight:
                engine.abort()
        if self._cutting and not self._in_flight:
            self._finished = True
            self._store.add(self._handed_in, 1)

    def _submit(self, requests: list[Request]) -> None:
        if requests and self._engine is not None:
            self._in_flight += len(requests)
            self._engine.submit(requests, self._sampling)

    def _put_away(self, sample: Sample) -> None:
        if self._cutting and sample.finish == "abort":
            self._work.cut[sample.id] = sample
            return
        self._work.done[sample.id] = sample
        self._work.tokens += sum(sample.generated_mask)
        self._deal.finish(sample.id)
        self._tell(sample)

    def _survive(self, error: EngineDiedError) -> None:
        self._work.deaths += 1
        if self._work.deaths == DEATHS_BEFORE_GIVING_UP:
            raise UserError(f"the engine died {self._work.deaths} times in one rollout: {error}") from error
        self._rescue.revive()
        if self._cutting and self._engine is not None:
            self._engine.abort()
