"""A host process as the rank that started it sees it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from verl_mg.errors import UserError
from verl_mg.rollout.engine import EngineDiedError

LAST_LINES = 12
"""How much of an engine's log an error shows."""
NOISE = "Ignore import error when loading"
"""SGLang says so of each model class that a smaller installation lacks something for."""


class EngineProcess:
    """One run of `verl_mg.rollout.sglang.engine_process`; what it writes goes to `log`, behind what is there.

    Its messages are read by a thread; `inbox` has them, and None once the stream has ended.
    """

    def __init__(self, arguments: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        self._log = log
        self.inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "verl_mg.rollout.sglang.engine_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,  # a Ctrl-C is for the job, which then ends the engine
            )
        self._socket = ours
        threading.Thread(target=self._listen, daemon=True, name="engine-messages").start()
        self.send({"arguments": arguments})

    @property
    def pid(self) -> int:
        """Of the host; SGLang's processes are its children."""
        return self._process.pid

    def wait_until_ready(self, timeout: float) -> None:
        """Block until the engine answers. UserError with the end of the log where it cannot start."""
        try:
            message = self.inbox.get(timeout=timeout)
        except queue.Empty:
            self.kill()
            late = f"the engine did not start in {timeout:.0f} s; its log {self._log} ends:{self.last()}"
            raise UserError(late) from None
        if message is None:
            self.kill()
            raise UserError(f"the engine could not start; its log {self._log} ends:{self.last()}")

    def send(self, message: dict[str, Any]) -> None:
        """A line to the host; nothing where it is gone, which the inbox tells."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def last(self) -> str:
        """The last lines of the log, each on a line of its own."""
        with self._log.open(errors="replace") as lines:
            kept = deque((line for line in lines if line.strip() and NOISE not in line), LAST_LINES)
        return "".join(f"\n  {line.rstrip()}" for line in kept)

    def died(self) -> EngineDiedError:
        """What to raise when the stream has ended."""
        self.kill()
        return EngineDiedError(f"the engine's process ended; its log {self._log} ends:{self.last()}")

    def close(self, timeout: float = 20.0) -> None:
        """Let the engine end, or end it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """End the host and all of SGLang's processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                self.inbox.put(json.loads(line))
        self.inbox.put(None)


def next_message(inbox: queue.SimpleQueue[dict[str, Any] | None], until: float) -> dict[str, Any] | None:
    """The next message before the time `until` (of `time.monotonic`); queue.Empty if none came."""
    return inbox.get(timeout=max(0.0, until - time.monotonic()))
