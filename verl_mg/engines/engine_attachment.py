"""Place of an engine that outlives its rank: a socket in a folder of the launcher, at which the next rank finds it.

    first rank  starts the process, with its program and this attachment as the first message
    rank lost   requests continue; the process waits at the socket
    next rank   sends the key and the digest of the engine that it needs   ──▶  the same engine: it is this rank's now
                                                                           ──▶  another one: the process ends
    launcher    ends, or no rank comes within WAIT_SECONDS                 ──▶  the process ends

Only one user can read the folder; the key is in a file there, and in no environment.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_mg.distributed.launcher import Launcher

WAIT_SECONDS = 600.0  # time for the next rank of an engine to come, in seconds
GREETING_SECONDS = 10.0  # time for a connection to show its key, in seconds

NO_ENGINE = ""  # digest of a rank that needs no engine

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class EngineAttachment:
    """Place of an engine, and the program that it has to run."""

    path: str  # path of the engine's socket
    launcher: str  # path of the launcher's socket, whose connections end with the launcher
    key: str
    digest: str  # digest of the engine's program without what differs between two starts of it
    pid: int  # process that the first rank has started

    @staticmethod
    def path_of_rank(launcher: Launcher) -> Path:
        """Returns the path of the socket of the engine that this rank leads; it exists where the engine was kept."""
        return launcher.folder / f"engine-{os.environ['LOCAL_RANK']}"

    @classmethod
    def of_rank(cls, launcher: Launcher, digest: str) -> EngineAttachment:
        """Returns the attachment of the engine that this rank leads."""
        return cls(
            path=str(cls.path_of_rank(launcher)),
            launcher=str(launcher.socket),
            key=launcher.key.read_text(encoding="ascii"),
            digest=digest,
            pid=0,  # known once the process runs, see `EngineProcess.start`
        )

    def find(self, timeout: float) -> tuple[socket.socket, dict[str, Any]] | None:
        """Returns a connection to the engine and its state; None where there is none, or another one, which then ends.

        `timeout` limits each step in seconds; an engine that is still starting answers when it is ready.
        """
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout)
        with suppress(OSError):
            connection.connect(self.path)
            connection.sendall(json.dumps({"key": self.key, "digest": self.digest}).encode() + b"\n")
            with connection.makefile("rb") as lines:  # one line: an engine sends no other before it gets requests
                state = lines.readline()
            if state:
                connection.settimeout(None)
                return connection, json.loads(state)
        connection.close()
        return None


class EngineListener:
    """The side of the engine's process: waits for ranks at the socket, which it opens before the engine is ready."""

    def __init__(self, attachment: EngineAttachment, limit: int) -> None:
        self.attachment, self._limit = attachment, limit
        self._listener = socket.socket(socket.AF_UNIX)
        with suppress(FileNotFoundError):
            os.unlink(attachment.path)  # left by an engine that has ended: its path would be refused
        self._listener.bind(attachment.path)
        self._listener.listen()
        self._listener.setblocking(False)

    async def until_launcher_ends(self) -> None:
        """Returns when the launcher has ended."""
        # The launcher never answers; the stream ends with it, however it ends.
        with suppress(OSError):
            reader, _ = await asyncio.open_unix_connection(self.attachment.launcher)
            await reader.read()

    async def ranks(self) -> AsyncIterator[Streams]:
        """Yields the streams of each rank that comes in time, until one needs another engine."""
        # Consumes connections; waits WAIT_SECONDS for each; ends by time-out, or with a rank that needs another engine.
        while True:
            try:
                streams, greeting = await asyncio.wait_for(self._next(), WAIT_SECONDS)
            except TimeoutError:
                print(f"no rank has come within {WAIT_SECONDS:.0f} s", flush=True)
                return
            if greeting["digest"] != self.attachment.digest:
                return  # the rank waits for the end of the process
            yield streams

    async def _next(self) -> tuple[Streams, dict[str, Any]]:
        """Returns the next connection that has shown the key."""
        loop = asyncio.get_running_loop()
        while True:
            # Any process of this user can connect: whatever does not show the key is closed, and the loop continues.
            connection, _ = await loop.sock_accept(self._listener)
            reader, writer = await asyncio.open_connection(sock=connection, limit=self._limit)
            with suppress(OSError, TimeoutError, ValueError, KeyError, AttributeError):
                greeting = json.loads(await asyncio.wait_for(reader.readline(), GREETING_SECONDS))
                if hmac.compare_digest(greeting["key"].encode(), self.attachment.key.encode()):
                    return (reader, writer), greeting
            writer.close()
