"""Runs a command in the sandbox, in folders that remain, with one address that it can reach."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_mg.sandbox import supervisor
from verl_mg.sandbox.relay import open_listener, relay_to
from verl_mg.sandbox.supervisor import Isolation, Program, Visible, interpreter_paths

OPEN_LISTENER = f"{inspect.getsource(open_listener)}\n{open_listener.__name__}()\n"
SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf", "/etc/ssl/certs")
"""Files of the system that programs expect and that contain no secrets."""
OVERFLOW_USER, USER_INSIDE = 65534, 1000
"""User ids that a program sees: the kernel's for a user without a mapping, and bubblewrap's."""
TMP_MB, FILE_MB, OPEN_FILES = 1024, 4096, 4096


@dataclass(frozen=True)
class Limits:
    """Limits of a command and its processes."""

    seconds: float  # time from start to end
    memory_mb: int = 8192
    """Private memory of each process in MiB; reserved address space and shared memory do not count."""
    processes: int = 512  # processes and threads


async def run_command(
    command: Sequence[str],
    *,
    folder: Path,
    directory: str,
    environment: Mapping[str, str],
    limits: Limits,
    visible: Sequence[Visible] = (),
    readable: Sequence[str] = (),
    endpoint: tuple[str, int] | None = None,
    output: Callable[[bytes], None] = lambda piece: None,
) -> int:
    """Runs a command on an event loop until all of its processes have ended; cancelling the task kills them.

    Where the kernel permits namespaces, the command sees the system's programs and libraries, this interpreter,
    `readable` and `visible`, a /tmp in memory, its processes, and of the network only `endpoint`, at the same port of
    127.0.0.1. Elsewhere it has the rights of its user, which is an unused one if root runs it, and the whole network.
    Files in folders that it may change are limited in size each (4 GiB), not in total.

    `directory` is the working directory as the command sees it, `readable` has absolute paths; no environment variable
    is inherited. Returns the exit code, as in a shell 128 + the number of a signal, and 127 without such a program.
    TimeoutError after the time limit, OSError where nothing can be started on this machine.
    """
    kind = supervisor.isolation()
    async with contextlib.AsyncExitStack() as opened:
        channel = None
        if endpoint is not None and kind != "none":
            channel = await opened.enter_async_context(relay_to(*endpoint))
        connect = ("-", "-") if channel is None or endpoint is None else (str(channel), str(endpoint[1]))
        # DATA rather than AS: many programs reserve much more address space than they use.
        memory = limits.memory_mb << 20
        program = Program(
            command=[sys.executable, "-I", "-S", "-c", OPEN_LISTENER, *connect, *command],
            binary=os.path.realpath(sys.executable),
            directory=directory,
            memory_mb=TMP_MB,
            processes=limits.processes,
            limits={
                "DATA": (memory, memory),
                "FSIZE": (FILE_MB << 20,) * 2,
                "NOFILE": (OPEN_FILES,) * 2,
                "CORE": (0, 0),
            },
            environment=environment,
            visible=[
                *interpreter_paths([*readable, *SETTINGS]),
                Visible(_write_users(folder, kind, environment), "/etc/passwd"),
                *visible,
            ],
            proc=supervisor.proc_works(kind),
            channel=channel,
        )
        status = await supervisor.run(program, kind, str(folder), None, limits.seconds, output, output)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _write_users(folder: Path, kind: Isolation, environment: Mapping[str, str]) -> str:
    """Writes the file of users, without which some programs do not start, and returns its path."""
    alone = OVERFLOW_USER if os.geteuid() == 0 else os.geteuid()
    user = USER_INSIDE if kind == "bubblewrap" else alone
    file = folder / "passwd"
    file.write_text(f"agent:x:{user}:{user}::{environment.get('HOME', '/')}:/bin/sh\n", encoding="utf-8")
    return str(file)
