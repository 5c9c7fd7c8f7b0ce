"""Run a Python program that nobody has read, and get its output, whatever it does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl_mg.errors import UserError

Ended = Literal["ok", "error", "timeout", "memory", "output"]

CELL = Path(__file__).with_name("cell.py")
PROCESSES, OPEN_FILES, FILE_MB = 16, 64, 64
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin")
"""Where the libraries of an interpreter lie, beside its own folders."""


@dataclass(frozen=True)
class Outcome:
    """What a program wrote, each stream cut at the limit, and how it ended.

    ended: "ok" (exit code 0), "error" (another code, or a signal), "timeout", "memory" (an allocation failed), or
    "output" (it wrote more than it may).
    """

    stdout: str
    stderr: str
    ended: Ended


def run_python(
    code: str, *, stdin: str = "", seconds: float = 10, memory_mb: int = 512, output_bytes: int = 1 << 16
) -> Outcome:
    """Run a program in a fresh interpreter; blocks until nothing of it is left. Not for the thread of an event loop.

    Always: a process and a session of its own, an empty environment, an empty working directory that is removed
    with what it holds, the packages of this interpreter, at most 16 processes, 64 open files of 64 MB, `memory_mb`
    and `seconds` of computing for each process, and an end to all of its processes when it ends or time is up.

    Where the kernel grants namespaces (`isolated()`), also: no network; of the machine's files nothing but the
    interpreter, its packages and the system's libraries, read-only; what it writes stays in memory and is limited by
    `memory_mb` in all; it sees no other process.

    Elsewhere it can read, write and connect as the user can whose rights it has: those of a user who owns nothing if
    root runs it; if not, your own, so that it could change your files and end your processes.

    Args:
        seconds: from start to end by the clock, the start of the interpreter included.
        output_bytes: for each of the two streams; a program that writes more is ended.

    Raises:
        UserError: a limit is not positive.
        OSError: the machine cannot start it.
    """
    return asyncio.run(
        run_python_async(code, stdin=stdin, seconds=seconds, memory_mb=memory_mb, output_bytes=output_bytes)
    )


async def run_python_async(
    code: str, *, stdin: str = "", seconds: float = 10, memory_mb: int = 512, output_bytes: int = 1 << 16
) -> Outcome:
    """`run_python` for an event loop; a task that is cancelled ends its program."""
    for name, limit in (("seconds", seconds), ("memory_mb", memory_mb), ("output_bytes", output_bytes)):
        if limit <= 0:
            raise UserError(f"{name} is {limit}: give a sandbox a positive limit")
    return await _run(code, stdin, seconds, memory_mb, output_bytes, isolated())


@functools.cache
def isolated() -> bool:
    """Whether this machine grants namespaces, found out by trying."""
    # A thread of its own, since the caller's may be running an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_try_namespaces).result()


def _try_namespaces() -> bool:
    try:
        return asyncio.run(_run("", "", 60, 512, 1, isolated=True)).ended == "ok"
    except OSError:
        return False


async def _run(code: str, stdin: str, seconds: float, memory_mb: int, output_bytes: int, isolated: bool) -> Outcome:
    report, report_end = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as source,
        os.fdopen(report, "rb") as reports,
    ):
        # Half of a surrogate pair, which a model can write, is no UTF-8.
        (Path(folder) / "program.py").write_text(code, encoding="utf-8", errors="replace")
        source.write(stdin.encode(errors="replace"))
        source.seek(0)
        order = {
            "report": report_end,
            "isolated": isolated,
            "folder": folder,
            "paths": _visible(),
            "binary": os.path.realpath(sys.executable),
            "command": [sys.executable, "-I", "-u", "-X", "utf8", "program.py"],
            "memory_mb": memory_mb,
            "file_mb": FILE_MB,
            "cpu_seconds": math.ceil(seconds),
            "open_files": OPEN_FILES,
            "processes": PROCESSES,
        }
        try:
            warden = await _start_warden(order, source.fileno())
        finally:
            os.close(report_end)
        stdout, stderr = bytearray(), bytearray()
        stopped = await _follow(warden, stdout, stderr, seconds, output_bytes)
        result = json.loads(reports.readline() or "{}")
    if "failed" in result:
        raise OSError(f"the sandbox cannot start a program: {result['failed']}")
    written, errors = stdout.decode(errors="replace"), stderr.decode(errors="replace")
    return Outcome(written, errors, stopped or _reason(result.get("status", 1), errors))


async def _start_warden(order: dict[str, Any], stdin: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(CELL), json.dumps(order)),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=(order["report"],),
        start_new_session=True,
        env={},
    )


async def _follow(
    warden: asyncio.subprocess.Process, stdout: bytearray, stderr: bytearray, seconds: float, output_bytes: int
) -> Ended | None:
    """Collect the output until the program has ended or has to; why it had to, if so."""
    assert warden.stdout is not None and warden.stderr is not None
    tasks = [
        asyncio.create_task(_fill(stdout, warden.stdout, output_bytes)),
        asyncio.create_task(_fill(stderr, warden.stderr, output_bytes)),
        asyncio.create_task(warden.wait()),
    ]
    try:
        done, pending = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        with contextlib.suppress(ProcessLookupError):
            warden.terminate()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A process counts as ended only when its pipes have been read to their ends.
        await asyncio.gather(_drain(warden.stdout), _drain(warden.stderr), warden.wait())
    if any(task.exception() for task in done):
        return "output"
    return "timeout" if pending else None


async def _fill(kept: bytearray, stream: asyncio.StreamReader, limit: int) -> None:
    while chunk := await stream.read(1 << 16):
        room = limit - len(kept)
        kept += chunk[:room]
        if len(chunk) > room:
            raise OverflowError


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass


def _reason(status: int, stderr: str) -> Ended:
    """From the wait status and the last words of a program that ended by itself."""
    if status == 0:
        return "ok"
    # The kernel sends SIGKILL when the machine runs out of memory, SIGXCPU after the seconds of computing.
    by_signal: dict[int, Ended] = {signal.SIGKILL: "memory", signal.SIGXCPU: "timeout"}
    if os.WIFSIGNALED(status):
        return by_signal.get(os.WTERMSIG(status), "error")
    return "memory" if stderr.rstrip().rpartition("\n")[2].startswith("MemoryError") else "error"


@functools.cache
def _visible() -> list[str]:
    """What an interpreter has to see of the machine: no path lies inside another."""
    own = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    chosen: list[str] = []
    for path in sorted({*SYSTEM, *own, *map(os.path.realpath, own)}):
        if os.path.exists(path) and not any(path.startswith(f"{other}/") for other in chosen):
            chosen.append(path)
    return chosen
