"""Handle of an engine's process, in the rank that starts it or attaches to it after another rank was lost.

The process runs `PYTHON -m MODULE SOCKET`, where MODULE is the host of the engine (see `engine_host`), and leads a
session and a process group. Both ends of the socket exchange lines of JSON. The end of the stream ends the process
together with the engine's processes, unless the engine has an attachment (see `engine_attachment`). `process_engine`
draws all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import verl_mg
from verl_mg.engines.engine import EngineDiedError
from verl_mg.engines.engine_attachment import EngineAttachment
from verl_mg.errors import UserError

LOG_TAIL_LINES = 12  # lines of an engine's log in an error message
# SGLang logs this for each model class whose optional dependencies are missing.
NOISE = "Ignore import error when loading"
# Environment variables of a rank that would mislead an engine.
OF_THE_LAUNCHER = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
}
# Environment variables of a rank that are only for training. SGLang's release of memory refuses `expandable_segments`
# of the allocator, and engines compute on more hardware queues than Megatron.
OF_TRAINING = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"}
# Folder from which the host's module is imported, also by an interpreter in which this package is not installed.
PACKAGE_ROOT = str(Path(verl_mg.__file__).parents[1])


@dataclass(frozen=True)
class EngineProgram:
    """Program that the process of an engine runs."""

    engine: str  # name of the engine, in messages
    python: str
    module: str  # module of the engine's host
    arguments: Mapping[str, Any]  # arguments of the engine by its own names, as JSON
    environment: Mapping[str, str]
    options: Mapping[str, Any]  # `EngineOptions` as JSON

    @property
    def digest(self) -> str:
        """SHA-256 of the program, the same for two starts of it; variables of the environment do not count."""
        parts = [self.engine, self.python, self.module, dict(self.arguments), dict(self.options)]
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class EngineState:
    """State of an engine that an earlier rank has left."""

    version: int  # policy version of the weights; -1: it has none, or a part of an update
    asleep: frozenset[str]  # parts that have released their memory: "weights", "kv"


class EngineProcess:
    """Handle of an engine process. A thread puts its messages into `inbox`, and None at the end of the stream.

    `start` and `find` create it. `child` is None for a process that an earlier rank has started.
    """

    def __init__(
        self,
        engine: str,
        log: Path,
        connection: socket.socket,
        pid: int,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._engine, self._log, self._reason = engine, log, ""
        self._socket, self._child, self.pid = connection, child, pid
        self._end = os.pidfd_open(pid)  # readable at the end of any process, also of one that is not a child
        self.inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read_messages, daemon=True, name="engine-messages").start()

    @classmethod
    def start(
        cls,
        program: EngineProgram,
        log: Path,
        attachment: EngineAttachment | None = None,
        inherited: Collection[int] = (),
    ) -> EngineProcess:
        """Starts the process of an engine; without an attachment it ends with this rank.

        `inherited` are file descriptors that it keeps open.
        """
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, [PACKAGE_ROOT, program.environment.get("PYTHONPATH")]))
        with log.open("ab") as output, theirs:  # a copy of `theirs` here would keep the stream open after the process
            child = subprocess.Popen(
                [program.python, "-m", program.module, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *inherited],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**program.environment, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is handled by the job, which ends the engine
            )
        process = cls(program.engine, log, ours, child.pid, child)
        complete = asdict(replace(attachment, pid=child.pid)) if attachment else None
        process.send({"arguments": dict(program.arguments), "options": dict(program.options), "attachment": complete})
        return process

    @classmethod
    def find(
        cls, engine: str, log: Path, attachment: EngineAttachment, timeout: float
    ) -> tuple[EngineProcess, EngineState] | None:
        """Returns the process that an earlier rank has started, and its state; None without one.

        One that is being started has `timeout` seconds to be ready.
        """
        result = attachment.find(timeout)
        if result is None:
            return None
        connection, state = result
        try:
            process = cls(engine, log, connection, state["pid"])
        except ProcessLookupError:  # it has ended since
            return None
        return process, EngineState(state["version"], frozenset(state["asleep"]))

    def wait_until_ready(self, timeout: float) -> None:
        """Waits until the engine is ready; UserError with the end of the log where it cannot start."""
        try:
            message = self.inbox.get(timeout=timeout)  # the first message of a host says that it is ready
        except queue.Empty:
            self.kill()
            raise UserError(
                f"{self._engine}: the engine did not start within {timeout:.0f} s. See its log {self._log}, "
                f"which ends:{self.log_tail()}"
            ) from None
        if message is None:
            self.kill()
            reason = f" ({self._reason})" if self._reason else ""
            raise UserError(
                f"{self._engine}: the engine cannot start{reason}. See its log {self._log}, which ends:"
                f"{self.log_tail()}"
            )

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; a process that has ended is reported by the inbox instead."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def log_tail(self) -> str:
        """Returns the last lines of the log, each after a line break."""
        with self._log.open(errors="replace") as lines:
            kept = deque((line for line in lines if line.strip() and NOISE not in line), LOG_TAIL_LINES)
        return "".join(f"\n  {line.rstrip()}" for line in kept)

    def died(self) -> EngineDiedError:
        """Returns the exception to raise when the stream has ended."""
        self.kill()
        reason = f" ({self._reason})" if self._reason else ""
        return EngineDiedError(f"the engine's process ended{reason}; its log {self._log} ends:{self.log_tail()}")

    def close(self, timeout: float = 20.0) -> None:
        """Waits for the engine to end, and kills it after `timeout` seconds."""
        self.send({"end": None})
        self.leave()
        self.wait_until_ended(timeout)
        self.kill()

    def leave(self) -> None:
        """Ends this side of the stream; an engine with an attachment waits for the next rank."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)  # the thread still reads what the engine sends

    def wait_until_ended(self, timeout: float | None) -> bool:
        """Waits up to `timeout` seconds for the end of the process, and returns whether it has ended."""
        end = select.poll()  # one for each thread; select.select takes only the first 1024 files
        end.register(self._end, select.POLLIN)
        ended = bool(end.poll(None if timeout is None else 1000 * timeout))
        if ended and self._child:
            self._child.wait()  # a child that is not waited for stays in the table of processes
        return ended

    def kill(self, reason: str = "") -> None:
        """Kills the process and all of the engine's processes; the first reason is part of later errors."""
        self._reason = self._reason or reason
        # The engine's child processes are in the group of this one, and end with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait_until_ended(None)

    def _read_messages(self) -> None:
        # Consumes the engine's messages; waits for the next line; ends with the stream, whichever side ends it.
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                self.inbox.put(json.loads(line))
        self.inbox.put(None)


def inherited_environment() -> dict[str, str]:
    """Returns the environment of an engine process: this one without what is only for the rank."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in OF_THE_LAUNCHER | OF_TRAINING and not name.startswith(("TORCHELASTIC", "OMPI_", "PMIX_"))
    }
