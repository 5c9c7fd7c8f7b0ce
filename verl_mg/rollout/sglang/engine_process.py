"""The separate process of an `sglang.Engine`, and its handle in the rank that starts it.

`EngineProcess` runs `python -m verl_mg.rollout.sglang.engine_process SOCKET`, which runs `main`. Both ends of the
socket exchange lines of JSON:

    {"arguments": {...}}                                          first; the response is {"ready": true}
    {"generate": ID, "fields": {...}}                             -> {"sample": ID, ...}, when it is complete
    {"abort": ID}, {"abort": null}                                one request, all of them
    {"call": NUMBER, "method": NAME, "fields": {...}}             -> {"call": NUMBER, "ok": ..., "message": ...}

The end of the stream ends the process together with SGLang's processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from verl_mg.errors import UserError
from verl_mg.rollout.engine import EngineDiedError
from verl_mg.rollout.sglang.request_tracker import parse_response

LINE_LIMIT = 2**31
"""Largest length of a line, in bytes."""
ABORT_RETRY_SECONDS = 0.1
LOG_TAIL_LINES = 12
"""Lines of an engine's log in an error message."""
NOISE = "Ignore import error when loading"
"""SGLang logs this for each model class whose optional dependencies are missing."""


class EngineProcess:
    """Handle of an engine process. A thread puts its messages into `inbox`, and None at the end of the stream."""

    def __init__(self, arguments: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        """Starts the process.

        Args:
            arguments: keyword arguments of `sglang.Engine`.
            environment: environment variables of the process.
            log: file to which its output is appended.
        """
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
                start_new_session=True,  # Ctrl-C is handled by the job, which ends the engine
            )
        self._socket = ours
        threading.Thread(target=self._read_messages, daemon=True, name="engine-messages").start()
        self.send({"arguments": arguments})

    @property
    def pid(self) -> int:
        """Process id; SGLang's processes are its children."""
        return self._process.pid

    def wait_until_ready(self, timeout: float) -> None:
        """Waits until the engine is ready; UserError with the end of the log where it cannot start."""
        try:
            message = self.inbox.get(timeout=timeout)
        except queue.Empty:
            self.kill()
            raise UserError(
                f"SGLang: the engine did not start within {timeout:.0f} s. See its log {self._log}, "
                f"which ends:{self.log_tail()}"
            ) from None
        if message is None:
            self.kill()
            raise UserError(f"SGLang: the engine cannot start. See its log {self._log}, which ends:{self.log_tail()}")

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
        return EngineDiedError(f"the engine's process ended; its log {self._log} ends:{self.log_tail()}")

    def close(self, timeout: float = 20.0) -> None:
        """Waits for the engine to end, and kills it after `timeout` seconds."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """Kills the process and all of SGLang's processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read_messages(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                self.inbox.put(json.loads(line))
        self.inbox.put(None)


class EngineHost:
    """Runs in the engine process: handles messages, and sends results."""

    def __init__(self, engine: Any, writer: asyncio.StreamWriter) -> None:
        self._engine, self._manager, self._writer = engine, engine.tokenizer_manager, writer
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[str] = set()

    def handle_message(self, message: dict[str, Any]) -> None:
        """Starts the work that a message requests."""
        if "generate" in message:
            self._open.add(message["generate"])
            self._start(self._generate(message["generate"], message["fields"]))
        elif "abort" in message:
            self._start(self._abort(message["abort"]))
        else:
            self._start(self._call(message["call"], message["method"], message["fields"]))

    def send(self, **message: Any) -> None:
        """Sends a message to the rank."""
        self._writer.write(json.dumps(message).encode() + b"\n")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _generate(self, rid: str, fields: dict[str, Any]) -> None:
        try:
            result = parse_response(await self._engine.async_generate(rid=rid, **fields))
        except Exception as error:  # SGLang rejects a request, or ends one that never started
            result = {"error": f"{type(error).__name__}: {error}"}
        self._open.discard(rid)
        self.send(sample=rid, **result)

    async def _abort(self, rid: str | None) -> None:
        """Repeats the abort: one that overtakes its request has no effect."""
        targets = set(self._open) if rid is None else {rid}
        while targets & self._open:
            self._manager.abort_request(rid=rid or "", abort_all=rid is None)
            await asyncio.sleep(ABORT_RETRY_SECONDS)

    async def _become_idle(self, timeout_s: float) -> tuple[bool, str]:
        """Aborts all requests and waits until the schedulers have nothing left to do."""
        try:
            await asyncio.wait_for(self._abort(None), timeout_s)
            # Answered when all schedulers are idle, which is some steps later.
            flushed = await asyncio.wait_for(self._manager.flush_cache(timeout_s), timeout_s)
        except TimeoutError:
            return False, f"{len(self._open)} requests are not complete {timeout_s:.0f} s after they were aborted"
        return flushed.success, flushed.message

    async def _call(self, number: int, method: str, fields: dict[str, Any]) -> None:
        try:
            ok, text = await self._result(method, fields)
        except Exception as error:
            ok, text = False, f"{type(error).__name__}: {error}"
        self.send(call=number, ok=ok, message=text)

    async def _result(self, method: str, fields: dict[str, Any]) -> tuple[bool, str]:
        from sglang.srt.managers import io_struct

        if method == "become_idle":
            return await self._become_idle(**fields)
        kinds = {
            "begin_weight_update": io_struct.BeginWeightUpdateReqInput,
            "update_weights_from_tensor": io_struct.UpdateWeightsFromTensorReqInput,
            "end_weight_update": io_struct.EndWeightUpdateReqInput,
            "release_memory_occupation": io_struct.ReleaseMemoryOccupationReqInput,
            "resume_memory_occupation": io_struct.ResumeMemoryOccupationReqInput,
        }
        result = await getattr(self._manager, method)(kinds[method](**fields), None)
        # Some manager calls return None on success.
        return (bool(result[0]), str(result[1])) if result is not None else (True, "")


async def _serve(engine: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    host = EngineHost(engine, writer)
    host.send(ready=True)
    while line := await reader.readline():
        host.handle_message(json.loads(line))


def main() -> None:
    """Main function of the engine process: serves messages until the stream ends."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # SGLang's tokenizer manager uses the current event loop
    reader, writer = loop.run_until_complete(asyncio.open_connection(sock=connection, limit=LINE_LIMIT))
    arguments = json.loads(loop.run_until_complete(reader.readline()))["arguments"]
    from verl_mg.rollout.sglang.scheduler import Engine

    engine = Engine(**arguments)
    try:
        loop.run_until_complete(_serve(engine, reader, writer))
    finally:
        engine.shutdown()
        # Threads of SGLang may still wait for processes that have ended.
        os._exit(0)


if __name__ == "__main__":
    main()
