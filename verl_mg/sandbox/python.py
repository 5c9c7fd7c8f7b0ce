"""Runs an untrusted Python program and returns its output."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import shutil
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl_mg.errors import UserError

Ended = Literal["ok", "error", "timeout", "memory", "output"]

Isolation = Literal["bubblewrap", "namespaces", "none"]

SUPERVISOR = Path(__file__).with_name("namespace_jail.py")
PROCESSES, OPEN_FILES, FILE_MB = 16, 64, 64
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin")
"""Folders with the libraries of an interpreter, in addition to its installation."""


@dataclass(frozen=True)
class Outcome:
    """Output of a program and how it ended."""

    stdout: str
    """Standard output, cut at the limit."""
    stderr: str
    """Standard error, cut at the limit."""
    ended: Ended
    """"ok" (exit code 0), "error" (another code, or a signal), "timeout", "memory" (an allocation failed), or "output"
    (the output exceeded its limit)."""


def run_python(
    code: str, *, stdin: str = "", seconds: float = 10, memory_mb: int = 512, output_bytes: int = 1 << 16
) -> Outcome:
    """Runs a program in a new interpreter, and blocks until all of its processes have ended.

    Not to be called in the thread of an event loop.

    Always: a separate process and session, an empty environment, an empty working directory that is removed
    afterwards, the packages of this interpreter, at most 16 processes, 64 open files of 64 MB, `memory_mb` and
    `seconds` of CPU time per process. All of its processes are killed when it ends or its time is up.

    Where the kernel permits namespaces (`isolated()`), also: no network; only the interpreter, its packages and the
    system's libraries are visible, read-only; files that it writes are kept in memory and limited by `memory_mb` in
    total; other processes are invisible. bubblewrap builds the namespaces where it is installed, otherwise this
    package does.

    Elsewhere the program has the rights of its user: an unused user id if root runs it; otherwise your rights, so it
    could change your files and kill your processes.

    Args:
        code: source of the program.
        stdin: its standard input.
        seconds: time limit from start to end, the start of the interpreter included.
        memory_mb: memory limit in MiB.
        output_bytes: limit of each of the two output streams; a program that exceeds it is killed.

    Raises:
        UserError: a limit is not positive.
        OSError: the program cannot be started on this machine.
    """
    return asyncio.run(
        run_python_async(code, stdin=stdin, seconds=seconds, memory_mb=memory_mb, output_bytes=output_bytes)
    )


async def run_python_async(
    code: str, *, stdin: str = "", seconds: float = 10, memory_mb: int = 512, output_bytes: int = 1 << 16
) -> Outcome:
    """Runs a program like `run_python`, on an event loop; cancelling the task kills the program.

    Args:
        code: see `run_python`.
        stdin: see `run_python`.
        seconds: see `run_python`.
        memory_mb: see `run_python`.
        output_bytes: see `run_python`.
    """
    for name, limit in (("seconds", seconds), ("memory_mb", memory_mb), ("output_bytes", output_bytes)):
        if limit <= 0:
            raise UserError(f"{name}={limit}: out of range. Give the sandbox a positive limit.")
    return await _run(code, stdin, seconds, memory_mb, output_bytes, isolation())


def isolated() -> bool:
    """Returns whether programs run in namespaces on this machine."""
    return isolation() != "none"


@functools.cache
def isolation() -> Isolation:
    """Returns the best isolation that works on this machine, determined by trying."""
    candidates: tuple[Isolation, ...] = ("bubblewrap", "namespaces")
    # In another thread, since the caller's may be running an event loop.
    with ThreadPoolExecutor(1) as thread:
        return next((kind for kind in candidates if thread.submit(_works, kind).result()), "none")


def _works(kind: Isolation) -> bool:
    if kind == "bubblewrap" and not all(map(shutil.which, ("bwrap", "prlimit", "setpriv"))):
        return False
    try:
        return asyncio.run(_run("", "", 60, 512, 1, kind)).ended == "ok"
    except OSError:
        return False


async def _run(code: str, stdin: str, seconds: float, memory_mb: int, output_bytes: int, kind: Isolation) -> Outcome:
    report, report_end = os.pipe()
    with (
        tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as source,
        os.fdopen(report, "rb") as reports,
    ):
        # Half of a surrogate pair, which a model can write, is not valid UTF-8.
        (Path(folder) / "program.py").write_text(code, encoding="utf-8", errors="replace")
        source.write(stdin.encode(errors="replace"))
        source.seek(0)
        request = {
            "report": report_end,
            "isolation": kind,
            "bubblewrap": shutil.which("bwrap"),
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
            supervisor = await _start_supervisor(request, source.fileno())
        finally:
            os.close(report_end)
        stdout, stderr = bytearray(), bytearray()
        stopped = await _follow(supervisor, stdout, stderr, seconds, output_bytes)
        result = json.loads(reports.readline() or "{}")
    if "failed" in result:
        raise OSError(f"the sandbox cannot start a program: {result['failed']}")
    written, errors = stdout.decode(errors="replace"), stderr.decode(errors="replace")
    return Outcome(written, errors, stopped or _reason(result.get("status", 1), errors))


async def _start_supervisor(request: dict[str, Any], stdin: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(SUPERVISOR), json.dumps(request)),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=(request["report"],),
        start_new_session=True,
        env={},
    )


async def _follow(
    supervisor: asyncio.subprocess.Process, stdout: bytearray, stderr: bytearray, seconds: float, output_bytes: int
) -> Ended | None:
    """Collects the output until the program ends or exceeds a limit; returns that limit, or None."""
    assert supervisor.stdout is not None and supervisor.stderr is not None
    tasks = [
        asyncio.create_task(_fill(stdout, supervisor.stdout, output_bytes)),
        asyncio.create_task(_fill(stderr, supervisor.stderr, output_bytes)),
        asyncio.create_task(supervisor.wait()),
    ]
    try:
        done, pending = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        with contextlib.suppress(ProcessLookupError):
            supervisor.terminate()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A process counts as ended only when its pipes have been read to the end.
        await asyncio.gather(_drain(supervisor.stdout), _drain(supervisor.stderr), supervisor.wait())
    if any(task.exception() for task in done):
        return "output"
    return "timeout" if pending else None


async def _fill(kept: bytearray, stream: asyncio.StreamReader, limit: int) -> None:
    while chunk := await stream.read(1 << 16):
        free = limit - len(kept)
        kept += chunk[:free]
        if len(chunk) > free:
            raise OverflowError


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass


def _reason(status: int, stderr: str) -> Ended:
    """Determines how a program ended from its wait status and the end of its stderr."""
    if status == 0:
        return "ok"
    # The kernel sends SIGKILL when the machine runs out of memory, SIGXCPU after the limit of CPU time.
    by_signal: dict[int, Ended] = {signal.SIGKILL: "memory", signal.SIGXCPU: "timeout"}
    if os.WIFSIGNALED(status):
        return by_signal.get(os.WTERMSIG(status), "error")
    return "memory" if stderr.rstrip().rpartition("\n")[2].startswith("MemoryError") else "error"


@functools.cache
def _visible() -> list[str]:
    """Returns the paths that an interpreter needs; none is inside of another."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    chosen: list[str] = []
    for path in sorted({*SYSTEM, *prefixes, *map(os.path.realpath, prefixes)}):
        if os.path.exists(path) and not any(path.startswith(f"{other}/") for other in chosen):
            chosen.append(path)
    return chosen
