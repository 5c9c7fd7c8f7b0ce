"""Passes connections out of a sandbox without a network on to one address.

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
import socket
from collections.abc import AsyncIterator

CONNECTIONS = 64  # connections of one program at the same time; further ones wait
PIECE = 1 << 16


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
