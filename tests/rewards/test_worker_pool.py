"""Worker processes serve any thread, and are ended when they exceed a limit or their parent ends."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from verl_mg.errors import UserError
from verl_mg.rewards.worker_pool import WorkerPool

TIMEOUT = 600.0
FUNCTION = "verl_mg.rewards.math:is_equivalent"
HARD = r"\boxed{9^{9^{9}}}"


@pytest.fixture
def workers() -> Iterator[WorkerPool]:
    workers = WorkerPool(FUNCTION, limit=2, seconds=TIMEOUT)
    yield workers
    workers.close()


def children() -> set[psutil.Process]:
    """This process's child processes that run."""
    return {child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


def test_score_many_threads_share_few_workers(workers):
    before = children()
    with ThreadPoolExecutor(8) as threads:
        answers = [f"#### {number}/2" for number in range(40)]
        rewards = list(threads.map(lambda answer: workers.score(answer, "#### 3.5"), answers))
    assert [reward.value for reward in rewards if reward] == [float(number == 7) for number in range(40)]
    assert 1 <= len(children() - before) <= 2
    workers.close()
    assert children() == before


def test_score_timeout_kills_the_worker(workers):
    before = children()
    assert workers.score("5", "5") is not None
    first = children() - before
    workers.seconds = 0.2
    assert workers.score(HARD, "5") is None
    assert children() == before
    workers.seconds = TIMEOUT
    reward = workers.score("5", "5")
    assert reward is not None and reward.value == 1.0
    assert len(children() - before) == 1
    assert first != children() - before


def test_score_dead_worker_is_replaced(workers):
    before = children()
    assert workers.score("5", "5") is not None
    (process,) = children() - before
    process.kill()
    assert workers.score("5", "5") is None
    assert workers.score("5", "5") is not None


def test_score_worker_that_cannot_start_raises(workers, monkeypatch):
    monkeypatch.setattr(sys, "path", ["/nowhere"])
    for _ in range(3):  # more often than there may be workers
        with pytest.raises(OSError, match="a process for verl_mg.rewards.math:is_equivalent ended"):
            workers.score("5", "5")


@pytest.mark.parametrize(
    ("function", "arguments", "kind", "text"),
    [
        ("operator:truediv", (1, 0), RuntimeError, "ZeroDivisionError: division by zero"),
        ("operator:add", (1, 0), RuntimeError, "AttributeError: 'int' object has no attribute 'value'"),
        ("verl_mg.import_function:load_function", ("math", "key"), UserError, "^key"),
    ],
)
def test_score_of_function_that_raises_is_no_score(function, arguments, kind, text):
    workers = WorkerPool(function, limit=1, seconds=TIMEOUT)
    for _ in range(2):  # by the same worker
        with pytest.raises(kind, match=text):
            workers.score(*arguments)
    assert workers._count == 1
    workers.close()


def test_workers_end_with_their_parent():
    program = """
import os, threading
from verl_mg.rewards.worker_pool import WorkerPool
pool = WorkerPool("verl_mg.rewards.math:is_equivalent", limit=1, seconds=600.0)
thread = threading.Thread(target=lambda: pool.score("it is 5", "5"))
thread.start()
thread.join()
print(pool._idle.get()._process.pid, flush=True)
os._exit(0)  # as if it were killed
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (worker,) = done.stdout.split()
    assert not psutil.wait_procs([psutil.Process(pid) for pid in {int(worker)} & set(psutil.pids())], 600)[1]
