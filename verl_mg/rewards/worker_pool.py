"""Pool of worker processes for rewards of libraries whose time grows faster than the response.

In this process they would hold Python's lock, and math-verify limits its time by an alarm signal, which is delivered
to a main thread only. A computation that no alarm interrupts, inside one step of the interpreter, is ended by killing
its process.

    _start                 "ready"                     request
    -------> starting ----------------> idle (_idle) ----------> busy, one caller waits for its line
                |                          ^                       |           |
                | START_SECONDS            +------ response -------+           | `seconds`, or the process ended
                v                                                              v
             OSError                                                        killed: the caller scores 0

`run_worker` in the process consumes one line after another from stdin, waits there, and ends with it: when the pool
closes or this process dies.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_mg.errors import UserError
from verl_mg.rewards.sample import Reward

# Time limit for the start of a worker, on a busy machine; only importing sympy takes about a second.
START_SECONDS = 300.0
# Another worker starts when all have been busy for so long: a start costs more than most scores.
GROW_SECONDS = 0.5
# Address space of a worker; a formula may require more memory than the machine has.
MEMORY_BYTES = 4 << 30
PROGRAM = """
import importlib, json, sys
paths, function, imports = json.loads(sys.argv[1])
sys.path[:] = paths
from verl_mg.import_function import load_function
from verl_mg.rewards.worker_pool import run_worker
loaded = load_function(function, "reward")
for name in imports:
    importlib.import_module(name)
run_worker(loaded)
"""


@dataclass
class WorkerPool:
    """Pool of at most `limit` worker processes, started on demand. They end with this process."""

    function: str  # `package.module:function` that returns a `Reward` for arguments that JSON has
    limit: int
    seconds: float  # time limit of one call; a worker that exceeds it is killed
    imports: tuple[str, ...] = ()  # modules that the function uses, to be imported before the limit of a call begins
    _idle: queue.LifoQueue[_Worker] = field(default_factory=queue.LifoQueue)
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _starting: threading.Lock = field(default_factory=threading.Lock)

    def score(self, *arguments: Any) -> Reward | None:
        """Calls the function in a worker, from any thread; None where it exceeds a limit.

        Raises its UserErrors, and RuntimeError with the name and text of another error.
        """
        worker = self._acquire()
        try:
            result = worker.request(arguments, self.seconds)
        except TimeoutError:
            self._discard(worker)
            return None
        except BaseException:
            self._discard(worker)
            raise
        self._idle.put(worker)
        if isinstance(result, dict):
            raise (UserError if result["is_users"] else RuntimeError)(result["error"])
        return Reward(*result)

    def close(self) -> None:
        """Ends the idle worker processes."""
        while not self._idle.empty():
            self._discard(self._idle.get_nowait())

    def _acquire(self) -> _Worker:
        while True:
            try:
                return self._idle.get(timeout=GROW_SECONDS if self._count else 0.001)
            except queue.Empty:
                # One start at a time; other callers wait for a worker that becomes idle meanwhile.
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
            return _Worker(self.function, self.imports)
        except BaseException:
            with self._lock:
                self._count -= 1
            raise

    def _discard(self, worker: _Worker) -> None:
        with self._lock:
            self._count -= 1
        worker.kill()


def shared_pool(function: str, limit: int, seconds: float, imports: tuple[str, ...] = ()) -> WorkerPool:
    """Returns the pool of this process for a function, see `WorkerPool`; it is closed as the process ends."""
    return _pool_of_process(os.getpid(), function, limit, seconds, imports)


@functools.cache
def _pool_of_process(pid: int, function: str, limit: int, seconds: float, imports: tuple[str, ...]) -> WorkerPool:
    # By the number of the process: a forked one must not use its parent's.
    pool = WorkerPool(function, limit, seconds, imports)
    atexit.register(pool.close)
    return pool


class _Worker:
    """One worker process; a request and its response are one line of JSON each."""

    def __init__(self, function: str, imports: Sequence[str]) -> None:
        # A plain interpreter: `multiprocessing` and the pools built on it (`concurrent.futures`, pebble) run the user's
        # main script again with "spawn", and copy the locks of a process with many threads with "fork".
        command = [sys.executable, "-c", PROGRAM, json.dumps([sys.path, function, imports])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._buffer, self._poll = b"", select.poll()
        self._poll.register(self._stdout, select.POLLIN)
        try:
            self._read_line(START_SECONDS)
        except TimeoutError:
            self.kill()
            raise OSError(
                f"a process for {function} ended, or did not start within {START_SECONDS:.0f} s; see its last output"
            ) from None

    def request(self, arguments: Sequence[Any], seconds: float) -> list[Any] | dict[str, Any]:
        """Returns the fields of the reward, or the text of an error; TimeoutError where the process has ended."""
        try:
            self._stdin.write(json.dumps(arguments).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise TimeoutError from None
        response: list[Any] | dict[str, Any] = json.loads(self._read_line(seconds))
        return response

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._stdout.close()
        with contextlib.suppress(BrokenPipeError):  # a request that it has not read is dropped
            self._stdin.close()

    def _read_line(self, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            chunk = os.read(self._stdout.fileno(), 1 << 16) if ready else b""
            if not chunk:
                raise TimeoutError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def run_worker(function: Callable[..., Reward]) -> None:
    """Main function of a worker process: reads lines of arguments until stdin ends, writes rewards."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted job closes the pipe
    # What libraries print must not be mixed with the responses.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as responses:
        os.dup2(2, 1)
        print(json.dumps("ready"), file=responses, flush=True)
        for line in sys.stdin:
            try:
                reward = function(*json.loads(line))
                response = json.dumps([reward.value, reward.parts, reward.answer])
            except (MemoryError, RecursionError):  # limits too; the caller sees the end of the process
                return
            except UserError as error:
                response = json.dumps({"error": str(error), "is_users": True})
            except Exception as error:
                response = json.dumps({"error": f"{type(error).__name__}: {error}", "is_users": False})
            print(response, file=responses, flush=True)
