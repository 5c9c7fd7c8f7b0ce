"""Runs a command in the sandbox, in folders that remain, with one address that it can reach.

    sandbox, with a loopback interface only             this process, in the network of the machine
    open_listener: listens at 127.0.0.1:PORT
        the socket, through the channel --------------> _received --> _serve: accepts, up to CONNECTIONS
    program: connects to PORT ------------------------> _connect: near <-- _pass_on, _pass_on --> far, the address

A socket stays in the network in which it was opened, so this process accepts connections there without being in it.
Nothing else of the network outside is reachable.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_mg.sandbox import supervisor
from verl_mg.sandbox.supervisor import Isolation, Program, Visible, interpreter_paths

SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf", "/etc/ssl/certs")
"""Files of the system that programs expect and that contain no secrets."""
OVERFLOW_USER, USER_INSIDE = 65534, 1000
"""User ids that a program sees: the kernel's for a user without a mapping, and bubblewrap's."""
TMP_MB, FILE_MB, OPEN_FILES = 1024, 4096, 4096
CONNECTIONS = 64  # connections of one program at the same time; further ones wait
PIECE = 1 << 16


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
        listening = f"{inspect.getsource(open_listener)}\n{open_listener.__name__}()\n"
        program = Program(
            command=[sys.executable, "-I", "-S", "-c", listening, *connect, *command],
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


@contextlib.asynccontextmanager
async def relay_to(host: str, port: int) -> AsyncIterator[int]:
    """Yields the descriptor of a channel; connections to the socket sent through it reach an address until it ends."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        task = asyncio.create_task(_serve(ours, host, port))
        try:
            yield theirs.fileno()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _serve(channel: socket.socket, host: str, port: int) -> None:
    """Accepts connections of the program, waits for a free place for each, and ends when it is cancelled."""
    loop = asyncio.get_running_loop()
    with socket.socket(fileno=await _received(channel)) as listener:
        listener.setblocking(False)
        free = asyncio.Semaphore(CONNECTIONS)
        async with asyncio.TaskGroup() as connections:
            while True:
                await free.acquire()
                connection, _ = await loop.sock_accept(listener)
                connections.create_task(_connect(connection, host, port)).add_done_callback(lambda _: free.release())


async def _received(channel: socket.socket) -> int:
    """Waits for the listening socket, and returns its descriptor."""
    # asyncio has no method that receives descriptors.
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(channel, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(channel)
    return socket.recv_fds(channel, 1, 1)[1][0]


async def _connect(connection: socket.socket, host: str, port: int) -> None:
    """Passes bytes on in both directions until both have ended, or one of them fails."""
    async with contextlib.AsyncExitStack() as opened:
        near = await asyncio.open_connection(sock=connection)
        opened.callback(near[1].close)
        try:
            far = await asyncio.open_connection(host, port)
            opened.callback(far[1].close)
            async with asyncio.TaskGroup() as directions:
                directions.create_task(_pass_on(near[0], far[1]))
                directions.create_task(_pass_on(far[0], near[1]))
        except* OSError:
            pass  # either side has closed the connection, which the other one learns from its end


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE):
        writer.write(piece)
        await writer.drain()
    writer.write_eof()  # the other direction may still have bytes


def open_listener() -> None:
    """Starts a command once a socket listens; its source is sent into the sandbox, so it imports what it uses."""
    # Arguments: the descriptor of the channel and a port, or two dashes; then the command.
    import os
    import socket
    import sys

    channel, port, *command = sys.argv[1:]
    # The relay keeps the socket open; the program inherits neither the socket nor the channel.
    if port != "-":
        listener = socket.create_server(("127.0.0.1", int(port)), backlog=128)
        with listener, socket.socket(fileno=int(channel)) as connection:
            socket.send_fds(connection, [b"listener"], [listener.fileno()])
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)  # as in a shell
