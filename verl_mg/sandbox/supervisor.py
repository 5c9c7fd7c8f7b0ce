"""Runs a program under a supervisor process (`namespace_jail.py`) with the best isolation of this machine.

event loop                        supervisor process                  program
run: request file, pipes -------> starts it ------------------------> stdin, stdout, stderr
_follow: _pass_on, _pass_on <---------------------------------------- output
         ends with the supervisor, a time limit, an error of a consumer, or cancellation
         SIGTERM ---------------> kills all of its processes -------> ended
line of JSON <------------------- status, or why it did not start
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Literal

Isolation = Literal["bubblewrap", "namespaces", "none"]

SUPERVISOR = Path(__file__).with_name("namespace_jail.py")
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin")
"""Folders with the libraries of an interpreter, in addition to its installation."""
PROBE_SECONDS = 60.0  # time limit of the empty program that shows whether an isolation works


@dataclass(frozen=True)
class Visible:
    """A file or folder that a program can reach: absolute paths on the machine (`source`) and inside (`target`)."""

    source: str
    target: str
    writable: bool = False  # whether the program may change it; it then becomes its owner


@dataclass(frozen=True)
class Program:
    """A command with everything that it may use."""

    command: Sequence[str]  # arguments, the first one included
    binary: str
    directory: str  # working directory as the program sees it
    memory_mb: int  # limit in MiB of files that are kept in memory, such as those in /tmp
    processes: int  # largest number of processes and threads
    limits: Mapping[str, tuple[int, int]]
    """Limits of each process, soft and hard, by the name in `resource` without RLIMIT_."""
    environment: Mapping[str, str] = field(default_factory=dict)
    visible: Sequence[Visible] = ()  # files and folders that it can reach where there is isolation
    proc: bool = False  # whether it has a /proc with its processes where there is isolation, and links that need it
    channel: int | None = None  # descriptor that the program inherits; its network then has a loopback interface


def isolated() -> bool:
    """Returns whether programs run in namespaces on this machine."""
    return isolation() != "none"


@functools.cache
def isolation() -> Isolation:
    """Returns the best isolation that works on this machine, determined by trying."""
    candidates: tuple[Isolation, ...] = ("bubblewrap", "namespaces")
    return next((kind for kind in candidates if _in_thread(kind, proc=False)), "none")


@functools.cache
def proc_works(kind: Isolation) -> bool:
    """Returns whether programs with this isolation can have a /proc, which some containers forbid."""
    return kind != "none" and _in_thread(kind, proc=True)


def works(kind: Isolation, proc: bool = False) -> bool:
    """Returns whether a program can be run with an isolation; not to be called in the thread of an event loop."""
    if kind == "bubblewrap" and not all(map(shutil.which, ("bwrap", "prlimit", "setpriv"))):
        return False
    try:
        with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
            program = Program(
                command=[sys.executable, "-I", "-S", "-c", ""],
                binary=os.path.realpath(sys.executable),
                directory=folder if kind == "none" else "/",
                memory_mb=64,
                processes=16,
                limits={},
                visible=interpreter_paths(),
                proc=proc,
            )
            ended = asyncio.run(run(program, kind, folder, None, PROBE_SECONDS, _ignore, _ignore))
    except OSError:
        return False
    return ended == 0


async def run(
    program: Program,
    kind: Isolation,
    folder: str,
    stdin: int | None,
    seconds: float,
    on_stdout: Callable[[bytes], None],
    on_stderr: Callable[[bytes], None],
) -> int:
    """Runs a program on an event loop until all of its processes have ended; cancelling the task kills them.

    `folder` is a temporary folder, which the program owns without isolation; `stdin` a descriptor, or None for none.
    Returns the wait status, as `os.waitpid`. TimeoutError after `seconds`, an error of `on_stdout` or `on_stderr`, or
    OSError where nothing can be started; everything has been killed then.
    """
    report, report_end = os.pipe()
    with tempfile.TemporaryFile("w+") as request_file, os.fdopen(report, "rb") as reports:
        request = {
            "report": report_end,
            "isolation": kind,
            "bubblewrap": shutil.which("bwrap"),
            "folder": folder,
            # Folders before those inside of them.
            "visible": sorted(map(astuple, program.visible), key=itemgetter(1)),
        }
        json.dump(vars(program) | request, request_file, default=dict)  # a mapping may be of another type
        request_file.seek(0)
        try:
            supervisor = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(SUPERVISOR), str(request_file.fileno())),
                stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[fd for fd in (request_file.fileno(), report_end, program.channel) if fd is not None],
                start_new_session=True,
                env={},
            )
        finally:
            os.close(report_end)  # the supervisor has it: otherwise the end of `reports` would never come
        await _follow(supervisor, seconds, on_stdout, on_stderr)
        result = json.loads(reports.readline() or "{}")
    if "failed" in result:
        raise OSError(f"the sandbox cannot start a program: {result['failed']}")
    return int(result.get("status", 1))


def interpreter_paths(more: Iterable[str] = ()) -> list[Visible]:
    """Returns the paths that this interpreter needs, and `more` absolute paths; none is inside of another."""
    # A virtual environment has links to another installation, so each path is needed with its target.
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *more}
    chosen: list[str] = []
    for path in sorted({*SYSTEM, *prefixes, *map(os.path.realpath, prefixes)}):
        if os.path.exists(path) and not any(path.startswith(f"{other}/") for other in chosen):
            chosen.append(path)
    return [Visible(path, path) for path in chosen]


def _in_thread(kind: Isolation, proc: bool) -> bool:
    """Returns the result of `works`, from another thread, since the caller's may be running an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(works, kind, proc).result()


async def _follow(
    supervisor: asyncio.subprocess.Process,
    seconds: float,
    on_stdout: Callable[[bytes], None],
    on_stderr: Callable[[bytes], None],
) -> None:
    """Passes the output on until the program ends; raises TimeoutError, or the error of one of the two functions."""
    assert supervisor.stdout is not None and supervisor.stderr is not None
    tasks = [
        asyncio.create_task(_pass_on(supervisor.stdout, on_stdout)),
        asyncio.create_task(_pass_on(supervisor.stderr, on_stderr)),
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
        rest = (_pass_on(stream, _ignore) for stream in (supervisor.stdout, supervisor.stderr))
        await asyncio.gather(*rest, supervisor.wait())
    for task in done:
        if error := task.exception():
            raise error
    if pending:
        raise TimeoutError(f"not done within {seconds:g} s")


async def _pass_on(stream: asyncio.StreamReader, consume: Callable[[bytes], None]) -> None:
    while chunk := await stream.read(1 << 16):
        consume(chunk)


def _ignore(chunk: bytes) -> None:
    pass


@asynccontextmanager
async def temporary_folder(prefix: str) -> AsyncIterator[Path]:
    """Yields a new folder, and removes it with all that programs have left there."""
    folder = tempfile.mkdtemp(prefix=prefix)
    try:
        yield Path(folder)
    finally:
        await asyncio.to_thread(_remove, folder)


def _remove(folder: str) -> None:
    # `shutil.rmtree` holds a descriptor and a stack frame for each level, of which a program can make thousands.
    if os.geteuid():  # root needs no permission
        subprocess.run(["chmod", "-R", "u+rwx", "--", folder], stderr=subprocess.DEVNULL)
    subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL)
