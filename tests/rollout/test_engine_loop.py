"""The loop of a call on several ranks, each in a thread: events in one order, and few requests to the store."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from torch.distributed import HashStore

from tests.helpers.counted_store import CountedStore
from verl_mg.engines.engine import Sampling
from verl_mg.rollout import engine_loop
from verl_mg.rollout.engine_events import EngineEvents
from verl_mg.rollout.engine_loop import EngineLoop
from verl_mg.rollout.work_queue import DynamicWorkQueue, Group

SECONDS = 2.0


class SlowEngine:
    """Has two slots and completes a sample in SECONDS, and not before it may."""

    def __init__(self, may_complete):
        self._ends, self._may_complete = {}, may_complete

    def num_free_slots(self):
        return 2 - len(self._ends)

    def num_queue_slots(self):
        return 0

    def submit(self, requests, sampling):
        self._ends |= {request: time.monotonic() + SECONDS for request in requests}

    def collect(self, seconds):
        time.sleep(seconds)
        ends = self._ends.items() if self._may_complete.is_set() else ()
        complete = [request for request, end in ends if end < time.monotonic()]
        for request in complete:
            del self._ends[request]
        return [SimpleNamespace(id=request, finish="stop", generated_versions=[0]) for request in complete]

    def abort(self):
        raise AssertionError("all groups are needed")


class Rank:
    """One rank of a call, with a view of its own of the store."""

    def __init__(self, store, engine, num_engines):
        self.store, self.recovered = CountedStore(store), []
        self.events = EngineEvents(self.store)
        groups = [Group((0, 1)), Group((2,)), Group((3,))]
        self._queue = DynamicWorkQueue(self.store, "call", groups, len(groups))
        self._loop = EngineLoop(engine, num_engines, self._queue, self.store, "call", self)

    def recover(self, engine):
        self.recovered.append(engine)

    def run(self):
        self._loop.start([], lambda sample: sample, Sampling(max_new_tokens=1))
        return sorted(self._loop.run().completed)


def test_loop_of_a_call_needs_few_requests_and_all_ranks_see_restarts_in_order(monkeypatch):
    monkeypatch.setattr(engine_loop, "POLL_FRACTION", 0.5)  # the interval of a long call, in a short one
    store, announced = HashStore(), threading.Event()
    ranks = [Rank(store, SlowEngine(announced) if i < 2 else None, 2) for i in range(4)]
    with ThreadPoolExecutor(len(ranks)) as threads:
        started = [threads.submit(rank.run) for rank in ranks]
        time.sleep(SECONDS / 4)
        for engine in (7, 1, 7):
            ranks[3].events.announce_restart(engine)
        announced.set()
        completed = [running.result(timeout=600) for running in started]
    assert sorted(i for samples in completed for i in samples) == [0, 1, 2, 3] and completed[2:] == [[], []]
    assert [rank.recovered for rank in ranks] == [[7, 1, 7]] * 4
    # An idle rank: a `wait` and a `get` for each of four events, and what the announcements here add.
    assert ranks[2].store.requests == ["wait", "get"] * 4
    for rank in ranks[:2]:
        assert len(rank.store.requests) < 75, rank.store.requests
