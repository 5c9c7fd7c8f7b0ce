"""Processes in whose main threads mathematics is judged, for callers in other threads.

math-verify limits its time by an alarm, which rings in a main thread only. What no alarm interrupts, a computation
within one step of the interpreter, ends with its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from verl_mg.rewards.base import Reward

START_SECONDS = 300.0
"""On a machine that is busy; sympy alone takes one."""
GROW_SECONDS = 0.5
"""So long all are busy before there is one more: starting one costs more than most answers."""
PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from verl_mg.rewards.math_worker import main
main()
"""


@dataclass
class MathPool:
    """At most `limit` of them, started when they are needed; they end with this process.

    seconds: for an answer, after which its worker is ended.
    """

    limit: int
    seconds: float
    _idle: queue.LifoQueue[_Worker] = field(default_factory=queue.LifoQueue)
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _starting: threading.Lock = field(default_factory=threading.Lock)

    def judge(self, response: str, answer: str) -> Reward | None:
        """See `math.judge`; None where it took too long, or too much memory."""
        worker = self._take()
        try:
            result = worker.ask([response, answer], self.seconds)
        except TimeoutError:
            self._drop(worker)
            return None
        except BaseException:
            self._drop(worker)
            raise
        self._idle.put(worker)
        return Reward(*result)

    def close(self) -> None:
        """End those that are idle."""
        while not self._idle.empty():
            self._drop(self._idle.get_nowait())

    def _take(self) -> _Worker:
        while True:
            try:
                return self._idle.get(timeout=GROW_SECONDS if self._count else 0.001)
            except queue.Empty:
                if self._starting.acquire(blocking=False):
                    try:
                        if self._count < self.limit:
                            return self._start()
                    finally:
                        self._starting.release()

    def _start(self) -> _Worker:
        with self._lock:
            self._count += 1
        try:
            return _Worker()
        except BaseException:
            with self._lock:
                self._count -= 1
            raise

    def _drop(self, worker: _Worker) -> None:
        with self._lock:
            self._count -= 1
        worker.end()


class _Worker:
    def __init__(self) -> None:
        command = [sys.executable, "-c", PROGRAM, json.dumps(sys.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._buffer, self._poll = b"", select.poll()
        self._poll.register(self._stdout, select.POLLIN)
        try:
            self._line(START_SECONDS)
        except TimeoutError:
            self.end()
            raise OSError(
                f"a process for math-verify ended, or did not start within {START_SECONDS:.0f} s; see its last words"
            ) from None

    def ask(self, question: list[str], seconds: float) -> list[Any]:
        """TimeoutError where there is no answer, for lack of time or of a process."""
        try:
            self._stdin.write(json.dumps(question).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise TimeoutError from None
        answer: list[Any] = json.loads(self._line(seconds))
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdout.close()
        with contextlib.suppress(BrokenPipeError):  # what it has not read is of no interest
            self._stdin.close()

    def _line(self, seconds: float) -> bytes:
        until = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready = self._poll.poll(max(0.0, until - time.monotonic()) * 1000)
            chunk = os.read(self._stdout.fileno(), 1 << 16) if ready else b""
            if not chunk:
                raise TimeoutError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
