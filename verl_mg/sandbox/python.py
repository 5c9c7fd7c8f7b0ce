"""Runs an untrusted Python program and returns its output."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from typing import Literal

from verl_mg.errors import UserError
from verl_mg.sandbox import supervisor
from verl_mg.sandbox.supervisor import Isolation, Program, Visible, interpreter_paths, temporary_folder

Ended = Literal["ok", "error", "timeout", "memory", "output"]

PROCESSES, OPEN_FILES, FILE_MB = 16, 64, 64  # limits that are described at `run_python`


@dataclass(frozen=True)
class Outcome:
    """Output of a program, cut at the limit, and how it ended."""

    stdout: str
    stderr: str
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

    `seconds` is the time from start to end, the start of the interpreter included. `output_bytes` limits stdout and
    stderr each; a program that exceeds it is killed. OSError where no program can be started on this machine.
    """
    return asyncio.run(
        run_python_async(code, stdin=stdin, seconds=seconds, memory_mb=memory_mb, output_bytes=output_bytes)
    )


async def run_python_async(
    code: str, *, stdin: str = "", seconds: float = 10, memory_mb: int = 512, output_bytes: int = 1 << 16
) -> Outcome:
    """Runs a program like `run_python`, on an event loop; cancelling the task kills the program."""
    for name, limit in (("seconds", seconds), ("memory_mb", memory_mb), ("output_bytes", output_bytes)):
        if limit <= 0:
            raise UserError(f"{name}={limit}: out of range. Give the sandbox a positive limit.")
    kind = supervisor.isolation()
    async with temporary_folder("sandbox-") as folder:
        # Half of a surrogate pair, which a model can write, is not valid UTF-8.
        (folder / "program.py").write_text(code, encoding="utf-8", errors="replace")
        with tempfile.TemporaryFile() as source:
            source.write(stdin.encode(errors="replace"))
            source.seek(0)
            return await _run(str(folder), source.fileno(), seconds, memory_mb, output_bytes, kind)


async def _run(folder: str, stdin: int, seconds: float, memory_mb: int, output_bytes: int, kind: Isolation) -> Outcome:
    """Runs the program.py of a folder, with a descriptor as its standard input."""
    # SIGXCPU at the soft limit of CPU time, SIGKILL a second later for a program that ignores it.
    memory, cpu = memory_mb << 20, math.ceil(seconds)
    limits = {"FSIZE": (FILE_MB << 20,) * 2, "CPU": (cpu, cpu + 1), "NOFILE": (OPEN_FILES,) * 2, "CORE": (0, 0)}
    program = Program(
        # Unbuffered, so that the output of a program that is killed is not lost.
        command=[sys.executable, "-I", "-u", "-X", "utf8", "program.py"],
        binary=os.path.realpath(sys.executable),
        directory=folder if kind == "none" else "/tmp",
        memory_mb=memory_mb,
        processes=PROCESSES,
        limits={"AS": (memory, memory), **limits},
        visible=[*interpreter_paths(), Visible(f"{folder}/program.py", "/tmp/program.py")],
    )
    stdout, stderr = bytearray(), bytearray()
    status = 1
    stopped: Ended | None = None
    keep = functools.partial(_keep, limit=output_bytes)
    try:
        status = await supervisor.run(
            program, kind, folder, stdin, seconds, lambda c: keep(stdout, c), lambda c: keep(stderr, c)
        )
    except TimeoutError:
        stopped = "timeout"
    except OverflowError:
        stopped = "output"
    written, errors = stdout.decode(errors="replace"), stderr.decode(errors="replace")
    return Outcome(written, errors, stopped or _reason(status, errors))


def _keep(kept: bytearray, chunk: bytes, limit: int) -> None:
    free = limit - len(kept)
    kept += chunk[:free]
    if len(chunk) > free:
        raise OverflowError


def _reason(status: int, stderr: str) -> Ended:
    """Determines how a program ended from its wait status and the end of its stderr."""
    if status == 0:
        return "ok"
    # The kernel sends SIGKILL when the machine runs out of memory, SIGXCPU after the limit of CPU time.
    by_signal: dict[int, Ended] = {signal.SIGKILL: "memory", signal.SIGXCPU: "timeout"}
    if os.WIFSIGNALED(status):
        return by_signal.get(os.WTERMSIG(status), "error")
    return "memory" if stderr.rstrip().rpartition("\n")[2].startswith("MemoryError") else "error"
