"""Host of an engine, the main object of the engine's process: handles the rank's messages and sends results.

Messages are lines of JSON:

    {"arguments": {...}}                                first; the response is {"ready": true}
    {"generate": ID, "request": {...}}                  -> {"sample": ID, ...}, when it is complete
    {"abort": ID}, {"abort": null}                      one request, all of them
    {"call": NUMBER, "method": NAME, "fields": {...}}   -> {"call": NUMBER, "ok": ..., "message": ...}

This module is imported by the engine's interpreter, which may have few packages: it needs no more than the standard
library.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

LINE_LIMIT = 2**31
"""Largest length of a line, in bytes."""
ABORT_RETRY_SECONDS = 0.1
METHODS = frozenset({"load", "load_adapters", "sleep", "wake", "pause", "unpause"})
"""Methods of a host that the rank can call."""


class Host(Protocol):
    """Main object of an engine's process: an engine, or its part on a further node, which gets no messages."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Works until the rank's stream ends.

        Args:
            reader: stream of the rank's messages.
            writer: stream to the rank.
        """

    def shutdown(self) -> None:
        """Ends the engine's processes."""


class EngineHost(ABC):
    """Runs in the engine process; subclasses know one kind of engine.

    Its methods raise where the engine refuses; the rank gets the text.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.open_requests: set[str] = set()
        """Ids of the requests whose samples have not been sent."""

    @abstractmethod
    async def generate(self, rid: str, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the sample of a request, also where it was aborted.

        Args:
            rid: id of the request.
            request: fields of `request_tracker.EngineRequest`.

        Returns:
            tokens, logprobs, finish ("stop", "length" or "abort"), spans (a list of {"start", "end", "version"} of
            tokens; others have the version of the last update), routed_experts (base64 of int32, or None) and counts
            (of `engine_counts`, since the last sample).
        """

    @abstractmethod
    def abort(self, rid: str | None) -> None:
        """Aborts a request, or all with None; repeated until the samples have been sent."""

    @abstractmethod
    async def load(self, payloads: Sequence[str], version: int | None, flush: bool) -> None:
        """Copies tensors into the parameters.

        Args:
            payloads: one payload of `ipc_payload` per rank of the engine.
            version: policy version, with the last payloads of an update: what is derived from weights is computed then.
            flush: whether the cache of the old weights is flushed.
        """

    @abstractmethod
    async def load_adapters(self, payloads: Sequence[str], version: int, config: dict[str, Any]) -> None:
        """Replaces the adapters with which all further requests are computed; none may be in flight.

        Args:
            payloads: payloads of `ipc_payload` with all whole tensors by PEFT's names, one for each process that opens
                one.
            version: policy version.
            config: fields of PEFT's configuration.
        """

    @abstractmethod
    async def sleep(self, weights: bool, kv: bool, timeout_s: float) -> None:
        """Ends all requests and releases memory.

        Args:
            weights: whether to release the weights, whose values are lost.
            kv: whether to release the key-value cache.
            timeout_s: time limit for ending the requests; TimeoutError after it.
        """

    @abstractmethod
    async def wake(self, weights: bool, kv: bool) -> None:
        """Allocates released memory again.

        Args:
            weights: whether to allocate the weights, which remain undefined until an update.
            kv: whether to allocate the key-value cache.
        """

    @abstractmethod
    async def pause(self, keep_cache: bool) -> None:
        """Stops generation between two tokens, for an update of the weights with requests in flight.

        Args:
            keep_cache: whether requests continue on keys and values of the old weights; else these are recomputed.
        """

    @abstractmethod
    async def unpause(self) -> None:
        """Continues generation after `pause`."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the engine's processes."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves the rank's messages until the stream ends.

        Args:
            reader: stream of the rank's messages.
            writer: stream to the rank.
        """
        self._writer = writer
        self._send(ready=True)
        while line := await reader.readline():
            self._handle(json.loads(line))

    async def abort_until_sent(self, rid: str | None) -> None:
        """Aborts requests until their samples have been sent: an abort that overtakes its request has no effect."""
        targets = set(self.open_requests) if rid is None else {rid}
        while targets & self.open_requests:
            self.abort(rid)
            await asyncio.sleep(ABORT_RETRY_SECONDS)

    def _handle(self, message: dict[str, Any]) -> None:
        if "generate" in message:
            self.open_requests.add(message["generate"])
            self._start(self._generate(message["generate"], message["request"]))
        elif "abort" in message:
            self._start(self.abort_until_sent(message["abort"]))
        else:
            self._start(self._call(message["call"], message["method"], message["fields"]))

    def _send(self, **message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _generate(self, rid: str, request: dict[str, Any]) -> None:
        try:
            result = await self.generate(rid, request)
        except Exception as error:  # the engine rejects a request, or ends one that never started
            result = {"error": f"{type(error).__name__}: {error}"}
        self.open_requests.discard(rid)
        self._send(sample=rid, **result)

    async def _call(self, number: int, method: str, fields: dict[str, Any]) -> None:
        ok, text = True, ""
        try:
            if method not in METHODS:
                raise ValueError(f"no such method: {method}")
            await getattr(self, method)(**fields)
        except Exception as error:
            ok, text = False, f"{type(error).__name__}: {error}"
        self._send(call=number, ok=ok, message=text)


def main(create: Callable[[dict[str, Any], asyncio.AbstractEventLoop], Host]) -> None:
    """Main function of an engine process: serves messages until the stream ends.

    Args:
        create: starts the engine from its arguments; the event loop does not run yet.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # SGLang's tokenizer manager uses the current event loop
    reader, writer = loop.run_until_complete(asyncio.open_connection(sock=connection, limit=LINE_LIMIT))
    arguments = json.loads(loop.run_until_complete(reader.readline()))["arguments"]
    host = create(arguments, loop)
    try:
        loop.run_until_complete(host.serve(reader, writer))
    finally:
        host.shutdown()
        # Threads of the engine may still wait for processes that have ended.
        os._exit(0)
