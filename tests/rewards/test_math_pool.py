"""Worker processes answer any thread, and none outlives its purpose."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl_mg.rewards.math_pool import MathPool

PATIENCE = 60.0
HARD = r"\boxed{9^{9^{9}}}"


@pytest.fixture
def workers() -> Iterator[MathPool]:
    workers = MathPool(limit=2, seconds=PATIENCE)
    yield workers
    workers.close()


def children() -> set[str]:
    """Ids of the processes that this one has started."""
    own = str(os.getpid())
    return {
        file.parent.name
        for file in Path("/proc").glob("[0-9]*/stat")
        if file.exists() and file.read_text().rpartition(")")[2].split()[1] == own
    }


def test_many_threads_share_a_few(workers: MathPool) -> None:
    before = children()
    with ThreadPoolExecutor(8) as threads:
        answers = [f"#### {number}/2" for number in range(40)]
        judged = list(threads.map(lambda answer: workers.judge(answer, "#### 3.5"), answers))
    assert [reward.value for reward in judged if reward] == [float(number == 7) for number in range(40)]
    assert 1 <= len(children() - before) <= 2
    workers.close()
    assert children() == before


def test_what_takes_too_long_ends_with_its_process(workers: MathPool) -> None:
    before = children()
    assert workers.judge("5", "5") is not None
    first = children() - before
    workers.seconds = 0.2
    assert workers.judge(HARD, "5") is None
    assert children() == before
    workers.seconds = PATIENCE
    judged = workers.judge("5", "5")
    assert judged is not None and judged.value == 1.0
    assert len(children() - before) == 1
    assert first != children() - before


def test_one_that_died_is_replaced(workers: MathPool) -> None:
    before = children()
    assert workers.judge("5", "5") is not None
    (process,) = children() - before
    os.kill(int(process), 9)
    assert workers.judge("5", "5") is None
    assert workers.judge("5", "5") is not None


def test_one_that_cannot_start_is_an_error(workers: MathPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/nowhere"])
    for _ in range(3):  # more often than there may be workers
        with pytest.raises(OSError, match="a process for math-verify ended"):
            workers.judge("5", "5")


def test_they_end_with_the_process_that_started_them() -> None:
    program = """
import os, threading
from verl_mg.rewards import Sample, math
from tests.rewards.test_math_pool import children
before = children()
thread = threading.Thread(target=lambda: math.score(Sample("", "it is 5", "5", {}, "stop")))
thread.start()
thread.join()
print(*(children() - before), flush=True)
os._exit(0)  # as if it were killed
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (worker,) = done.stdout.split()
    for _ in range(100):
        if not Path(f"/proc/{worker}").exists() or "(zombie)" in Path(f"/proc/{worker}/status").read_text():
            return
        subprocess.run(["sleep", "0.1"], check=True)
    raise AssertionError(f"{worker} is still there")
