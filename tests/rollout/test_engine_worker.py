"""Workers of engines: events in one order, few requests to the store, an evaluation during training."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch.distributed import HashStore

from tests.helpers.counted_store import CountedStore
from tests.helpers.rank_pool import job_context
from verl_mg.data import Prompt
from verl_mg.engines.engine import GROWING, LIMIT, LIMITED, Request, RolloutEngine, Sampling, observed_load
from verl_mg.engines.engine_options import EngineOptions, EngineProgram
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.engines.reports import ReportRules
from verl_mg.engines.request_tracker import EngineLimits
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.rollout import engine_worker
from verl_mg.rollout.engine_group import ProcessEngineGroup
from verl_mg.rollout.engine_worker import EngineEvents, EngineRestart, EngineWorker
from verl_mg.rollout.groups import Group
from verl_mg.rollout.work_queue import StaticShare, WorkQueue

SECONDS = 2.0
PROMPT = Prompt(0, (1,), "", None, {})


class SlowEngine(RolloutEngine):
    """Has two slots and completes a sample in SECONDS, and not before it may."""

    def __init__(self, may_complete):
        self._ends, self._may_complete = {}, may_complete

    def num_free_slots(self):
        return 2 - len(self._ends)

    def health(self):
        return True

    def submit(self, requests, sampling):
        self._ends |= {request.id: time.monotonic() + SECONDS for request in requests}

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
        self.store, self.restarted, self._completed = CountedStore(store), [], []
        self.events = EngineEvents(self.store)
        groups = [Group(PROMPT, range(0, 2)), Group(PROMPT, range(2, 3)), Group(PROMPT, range(3, 4))]
        self._queue = WorkQueue(self.store, "call", Sampling(max_new_tokens=1), groups, len(groups))
        on_sample = self._completed.append
        self._worker = EngineWorker(
            engine, num_engines, self.events, lambda i: SimpleNamespace(id=i, partial=None), on_sample, on_sample
        )

    def run(self):
        self._worker.add(self._queue)
        self._worker.start()
        while not self.events.has_ended("call"):
            self.restarted += self.events.wait()
            self._worker.check()
        self._worker.close()
        return sorted(sample.id for sample in self._completed)


def test_workers_of_a_call_need_few_requests_and_all_ranks_see_restarts_in_order(monkeypatch):
    monkeypatch.setattr(engine_worker, "POLL_FRACTION", 0.5)  # the interval of a long call, in a short one
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
    assert [rank.restarted for rank in ranks] == [[7, 1, 7]] * 4
    # An idle rank: a `wait` and a `get` for each of four events, and what the announcements here add.
    assert ranks[2].store.requests == ["wait", "get"] * 4
    for rank in ranks[:2]:
        assert len(rank.store.requests) < 75, rank.store.requests


def test_limit_by_the_load_bounds_what_is_in_flight_and_grows_while_the_cache_is_free():
    class Engine(SlowEngine):
        """Has a cache of 1000 tokens, of which a sample uses 2, and completes the oldest half of its samples."""

        sizes: ClassVar[list[int]] = []

        def num_free_slots(self):
            return 100 - len(self._ends)

        def num_cache_tokens(self):
            return 1000

        def collect(self, seconds):
            self.sizes.append(len(self._ends))
            complete = list(self._ends)[: -(-len(self._ends) // 2)]
            self._ends = {i: 0.0 for i in self._ends if i not in complete}
            return [SimpleNamespace(id=i, finish="stop", generated_versions=[0]) for i in complete]

        def take_counts(self):
            return observed_load(self.sizes[-1], 0, 2 * self.sizes[-1], 1000) if self.sizes else {}

    store, engine, completed = HashStore(), Engine(threading.Event()), []
    worker = EngineWorker(
        engine, 1, EngineEvents(store), lambda i: SimpleNamespace(id=i, partial=None), completed.append,
        completed.append, longest=100,
    )  # fmt: skip
    groups = [Group(PROMPT, range(i, i + 9)) for i in range(0, 999, 9)]
    queue = WorkQueue(store, "call", Sampling(max_new_tokens=1), groups, len(groups))
    worker.add(queue)
    worker.work_off(queue)
    counts = worker.take_counts()
    assert engine.sizes[:2] == [10, 10], "as many as surely fit, until a change can have settled"
    assert max(engine.sizes) == 100 < worker.num_slots and len(completed) == 999
    assert counts[GROWING] == counts[LIMITED] and 10 < counts[LIMIT] / counts[LIMITED] <= worker.num_slots


def test_worker_gives_free_slots_to_an_evaluation_first_and_aborts_nothing():
    class Engine(SlowEngine):
        def __init__(self):
            super().__init__(threading.Event())
            self.submitted = []

        def submit(self, requests, sampling):
            super().submit(requests, sampling)
            self.submitted += [(request.id, sampling.temperature) for request in requests]

        def collect(self, seconds):
            """Completes the sample that was submitted first."""
            first = next(iter(self._ends))
            del self._ends[first]
            return [SimpleNamespace(id=first, finish="stop", generated_versions=[0])]

    store, engine, completed = HashStore(), Engine(), []
    events = EngineEvents(store)
    worker = EngineWorker(
        engine, 1, events, lambda i: SimpleNamespace(id=i, partial=None), completed.append, completed.append
    )
    training = WorkQueue(store, "queue", Sampling(max_new_tokens=1), is_open=True)
    worker.add(training)
    worker.append(training, [Group(PROMPT, range(2 * g, 2 * g + 2)) for g in range(4)], [])
    evaluation = WorkQueue(
        store, "call", Sampling(max_new_tokens=1, temperature=0.0), [Group(PROMPT, range(100, 103))], 1
    )
    worker._step(engine)
    worker.add(evaluation)
    worker.work_off(evaluation)
    assert engine.submitted == [(0, 1.0), (1, 1.0), (100, 0.0), (101, 0.0), (102, 0.0), (2, 1.0)]
    assert [sample.id for sample in completed] == [0, 1, 100, 101, 102]
    while not events.has_ended("call"):
        events.wait()


@pytest.mark.parametrize("is_static", [False, True])
def test_worker_whose_engine_has_no_further_samples_ends_the_call_without_a_look_at_the_others(is_static):
    class Engine(SlowEngine):
        def num_free_slots(self):
            return 4 - len(self._ends)

        def collect(self, seconds):
            ends, self._ends = self._ends, {}
            return [SimpleNamespace(id=i, finish="stop", generated_versions=[0]) for i in ends]

    store, completed = HashStore(), []
    groups = [Group(PROMPT, range(2 * g, 2 * g + 2)) for g in range(4)]
    workers, queues, events, stores = [], [], [], [CountedStore(store) for _ in range(2)]
    for number, counted in enumerate(stores):
        share = StaticShare(number, 2) if is_static else None
        queues.append(WorkQueue(counted, "call", Sampling(max_new_tokens=1), groups, 4, share=share))
        events.append(EngineEvents(counted))
        workers.append(
            EngineWorker(
                Engine(threading.Event()), 2, events[-1], lambda i: SimpleNamespace(id=i, partial=None),
                completed.append, completed.append,
            )
        )  # fmt: skip
        workers[-1].add(queues[-1])
    taken = [] if is_static else queues[1].pop(1)  # the second engine is at work on one sample
    workers[0].work_off(queues[0])
    assert len(completed) == (4 if is_static else 7) and not queues[0].is_done()
    assert stores[0].requests.count("set") == 0, "nothing is announced"
    queues[1].mark_done(taken)
    workers[1].work_off(queues[1])
    assert len(completed) == 8 - len(taken)
    while not events[0].has_ended("call"):
        events[0].wait()


HOST = """
import json, os, signal, socket, sys

stream, starts, deadly = socket.socket(fileno=int(sys.argv[1])), open(os.environ["STARTS"], "a+"), os.environ["DEADLY"]
starts.write("x")
starts.seek(0)
start = len(starts.read())
stream.sendall(b'{"chosen": {}, "size": {"max_running": 4, "cache_tokens": 256}}\\n')
for number, line in enumerate(stream.makefile("rb")):
    message = json.loads(line)
    if "call" in message:
        answer = {"call": message["call"], "ok": True, "message": ""}
    elif "generate" in message and str(start) not in deadly:
        tokens = {"tokens": [5], "logprobs": [-0.5], "finish": "length", "spans": [], "routed_experts": None}
        answer = {"samples": {item["rid"]: tokens for item in message["generate"]["items"]}}
    elif "generate" in message:
        print("no kernel for batches of this shape", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        continue
    stream.sendall(json.dumps(answer).encode() + b"\\n")
"""


class DyingKind:
    """An engine whose process ends when its first request arrives, in the starts that `deadly` names."""

    name, title = "sglang", "Engine"

    def __init__(self, folder: Path, deadly: str) -> None:
        (folder / "dying_host.py").write_text(HOST)
        self.starts = folder / "starts"
        self._environment = os.environ | {"PYTHONPATH": str(folder), "STARTS": str(self.starts), "DEADLY": deadly}

    def limits(self, model, options):
        rules = ReportRules(engine="rollout.engine=sglang", vocab=10)
        return EngineLimits(max_running=4, max_positions=64, reports=rules)

    def program(self, model, options, ports, address):
        return EngineProgram(self.title, sys.executable, "dying_host", {}, self._environment, {})


def generated_by_dying_engine(folder: Path, deadly: str, is_probed: bool = False) -> tuple[int, int]:
    """Number of samples, and of starts of the engine, in two calls of one sample; before, one request may be alone."""
    kind = DyingKind(folder, deadly)
    options = EngineOptions(layout=EngineLayout(), dtype=torch.float32, max_running=4, max_positions=64)
    engine = ProcessEngine(kind, folder, options, folder / "engine.log")
    events, completed = EngineEvents(HashStore()), []
    restart = EngineRestart(engine, 0, False, events)
    worker = EngineWorker(
        engine, 1, events, lambda i: Request(id=i, prompt=(1, 2), seed=i), completed.append, completed.append, restart
    )
    try:
        engine.loaded(engine.load([], 0))
        if is_probed:
            sync = SimpleNamespace(number=0)
            group = ProcessEngineGroup(sync, engine, [True], job_context(), sleep=False, disjoint=False)
            alone = group.generate_alone(Request(id=0, prompt=(1, 2), seed=0), Sampling(max_new_tokens=1))
            assert len(alone) == ("1" not in deadly)
        worker.start()
        for number in range(2):
            call = WorkQueue(HashStore(), f"call{number}", Sampling(max_new_tokens=1), [Group(PROMPT, range(1))], 1)
            worker.add(call)
            while not events.has_ended(call.key):
                for restarted in events.wait():
                    with worker.stopped():
                        engine.loaded(engine.load([], 0))
                    worker.weights_arrived(restarted)
                worker.check()
    finally:
        worker.close()
        engine.close()
    return len(completed), len(kind.starts.read_text())


def test_worker_of_an_engine_that_ends_with_each_first_batch_raises_its_last_lines(tmp_path):
    with pytest.raises(UserError, match=r"ended 2 times in a row before it completed a sample.*no kernel for batch"):
        generated_by_dying_engine(tmp_path, deadly="123456789")
    assert (tmp_path / "starts").read_text() == "xx"


def test_worker_of_an_engine_that_ends_once_with_its_first_batch_restarts_it(tmp_path):
    assert generated_by_dying_engine(tmp_path, deadly="1") == (2, 2)


@pytest.mark.parametrize(("deadly", "starts"), [("1", 2), ("", 1)])
def test_engine_that_ends_with_a_request_alone_is_restarted_by_the_first_call(ranks, tmp_path, deadly, starts):
    """The request is of no call: its sample is not generated again."""
    assert ranks.run(1, generated_by_dying_engine, tmp_path, deadly, True) == [(2, starts)]
