"""Host of an engine, the main object of the engine's process: handles the rank's messages and sends results.

Messages are lines of JSON (`process_engine` draws the two processes):

    {"arguments": {...}, "options": {...}, "attachment": {...}}     first; the response is {"ready": true, ...}
    {"generate": {...}}, of a `RequestBatch`            -> {"samples": {ID: {...}, ...}}, those completed together
    {"abort": ID}, {"abort": null}                      one request, all of them
    {"call": NUMBER, "method": NAME, "fields": {...}}   -> {"call": NUMBER, "ok": ..., "message": ...}
    {"end": null}                                       the process ends

All of it runs in one event loop, a task for each call and for each request. States of the process:

    main: starts the engine --> serves a rank --{"end"}, or end of the stream without an attachment--> shutdown, exit
                                 |         ^
              end of the stream, |         | a rank shows the key and needs the same engine
                 with attachment v         |
                            waits for a rank; requests continue --launcher ends, or WAIT_SECONDS--> shutdown, exit

The next rank (see `engine_attachment`) repeats its requests, which `RequestLedger` answers from what exists.

A rank that resumes from a checkpoint sends the requests of the repeated iterations again. One with the same sample, the
same content and the same version of the weights is the earlier one, whether its result exists or is being generated.
Weights of versions after the checkpoint are the same ones only in a deterministic job; in others their results are
dropped.

    add --> in flight --"stop", "length"--> kept --hand_over--> can be taken once by each further rank --+
                |                             |                        ^                                 | hand_over
                | aborted, failed,            | MAX_BYTES of newer     +---------------------------------+
                | other weights               | results
                +--------> dropped <----------+

A rank sends a request twice, with the results r1 and r2, and is lost. The next rank gets r1 for the first repetition,
r2 for the second, and a new result r3 for the third; the rank after it gets r1, r2 and r3.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from verl_mg.engines.engine_attachment import EngineAttachment, EngineListener
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.request_batch import RequestBatch

LINE_LIMIT = 2**31  # largest length of a line, in bytes; asyncio's default of 64 KiB is less than a long prompt
ABORT_RETRY_SECONDS = 0.1
# Methods of a host that the rank can call.
METHODS = frozenset({"begin_load", "load", "load_adapters", "read", "sleep", "wake", "pause", "unpause"})
CHANGES_WEIGHTS = frozenset({"begin_load", "load", "load_adapters"})
KEEPS_REQUESTS = frozenset({"read", "wake", "unpause"})  # those during which requests of lost ranks continue
# Time limit of an engine for ending its requests when its rank is lost and it shares a device with training.
PART_SECONDS = 60.0
MAX_BYTES = 2**28  # largest size of all results; the oldest are dropped first
TOKEN_BYTES = 80  # size of a token with its log-prob as Python's objects

T = TypeVar("T")
Result = dict[str, Any]  # of a request, see `EngineHost.generate`


class Host(Protocol):
    """Main object of an engine's process: an engine, or its part on a further node, which gets no messages."""

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener: EngineListener | None
    ) -> None:
        """Works until the rank's stream ends, or no further rank comes.

        Args:
            reader: stream of the rank's messages.
            writer: stream to the rank.
            listener: where further ranks come; None: none does.
        """

    def shutdown(self) -> None:
        """Ends the engine's processes."""


@dataclass
class Generation:
    """A request that the engine has received, and its result."""

    rid: str  # id of the request in the engine
    key: str  # see `RequestBatch.keys`
    version: int  # policy version of the engine's weights at its start; -1: they were being updated
    task: asyncio.Task[Result]  # generates the result
    can_answer: bool = True  # whether the next rank may have the result
    num_bytes: int = 0


class RequestLedger:
    """The requests since the engine started, as far as their results fit."""

    def __init__(self) -> None:
        self._generations: dict[int, Generation] = {}  # by identity, the last used last
        self._repeatable: dict[str, deque[Generation]] = {}
        self._num_bytes = 0

    def add(self, generation: Generation) -> None:
        """Adds a request that was sent to the engine."""
        self._generations[id(generation)] = generation
        generation.task.add_done_callback(lambda task: self._count(generation))

    def take(self, key: str) -> Generation | None:
        """Returns the earliest request of former ranks with this key, which no other request gets; None without one."""
        waiting = self._repeatable.get(key, ())
        while waiting:
            generation = waiting.popleft()
            if generation.can_answer:
                # Last in the order of use: the oldest are dropped first, and the next rank repeats in this order.
                self._generations[id(generation)] = self._generations.pop(id(generation))
                return generation
        return None

    def hand_over(self) -> None:
        """Makes the results so far available to the next rank, in the order in which they were used."""
        self._generations = {number: kept for number, kept in self._generations.items() if kept.can_answer}
        self._num_bytes = sum(generation.num_bytes for generation in self._generations.values())
        self._repeatable = {}
        for generation in self._generations.values():
            self._repeatable.setdefault(generation.key, deque()).append(generation)

    def drop_newer(self, version: int) -> None:
        """Drops requests of former ranks under newer weights than `version`: the next rank trains others."""
        for generation in self._generations.values():
            generation.can_answer = generation.can_answer and generation.version <= version

    def orphans(self) -> list[Generation]:
        """Returns the unfinished requests of former ranks that no rank has repeated."""
        return [g for waiting in self._repeatable.values() for g in waiting if not g.task.done()]

    def drop_unfinished(self) -> None:
        """Drops requests in flight: their further tokens are from other weights."""
        for generation in self._generations.values():
            generation.can_answer = generation.can_answer and generation.task.done()

    def _count(self, generation: Generation) -> None:
        task = generation.task
        if not generation.can_answer:
            return
        # An aborted result would be repeated as one that was complete.
        if task.cancelled() or task.exception() or task.result().get("finish") not in ("stop", "length"):
            generation.can_answer = False
            return
        generation.num_bytes = _size(task.result())
        self._num_bytes += generation.num_bytes
        while self._num_bytes > MAX_BYTES:
            oldest = self._generations.pop(next(iter(self._generations)))
            oldest.can_answer = False
            self._num_bytes -= oldest.num_bytes


def _size(result: dict[str, Any]) -> int:
    fed = (result.get("routed_experts") or "", result.get("selected_keys") or "")
    texts = [*fed, *(result.get("support") or ()), *(result.get("top") or ())]
    return TOKEN_BYTES * len(result["tokens"]) + sum(map(len, texts))


class EngineHost(ABC):
    """Runs in the engine process; subclasses know one kind of engine.

    Its methods raise where the engine refuses; the rank gets the text.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self._tasks: set[asyncio.Task[Any]] = set()
        self.open_requests: set[str] = set()  # ids of the requests that are not complete
        self._writer: asyncio.StreamWriter | None = None
        self._ledger: RequestLedger | None = None
        self._results: dict[str, Result] = {}  # samples that are sent together
        self._rids: dict[str, str] = {}  # ids of the requests in the engine, by the rank's
        self._num_ranks = 0
        self._version = -1
        self._asleep: set[str] = set()
        self._is_paused = False
        self._drops_newer = False

    @abstractmethod
    async def generate(self, requests: Mapping[str, dict[str, Any]]) -> Mapping[str, Awaitable[Result]]:
        """Starts requests, and returns for each of them what waits for its sample, also where it is aborted.

        Args:
            requests: by their ids the fields of `RequestBatch.requests`.

        Returns:
            tokens, logprobs, finish ("stop", "length" or "abort"), spans (a list of {"start", "end", "version"} of
            tokens; others have the version of the last update), routed_experts (base64 of int32, or None),
            selected_keys (the same, where the engine reports them), support and top (`sampled_support.Wire`, or None)
            and counts (of `engine.Counts`, since the last sample).
        """

    @abstractmethod
    def abort(self, rid: str | None) -> None:
        """Aborts a request, or all with None; repeated until the samples have been sent."""

    async def begin_load(self) -> None:  # noqa: B027, not all engines prepare anything
        """Prepares the parameters for `load`, which may come before this is complete."""

    @abstractmethod
    async def load(self, payloads: Sequence[str], version: int | None, flush: bool) -> None:
        """Copies tensors into the parameters.

        Args:
            payloads: one payload of `Staging` per rank of the engine.
            version: policy version, with the last payloads of an update: what is derived from weights is computed then.
            flush: whether the cache of the old weights is flushed.
        """

    @abstractmethod
    async def read(self, payloads: Sequence[str], is_last: bool) -> None:
        """Copies parameters into tensors of the same dtype, the inverse of `load`; requests continue.

        Args:
            payloads: as of `load`; their tensors name the parameters.
            is_last: whether no further ones follow.
        """

    @abstractmethod
    async def load_adapters(self, payloads: Sequence[str], version: int, config: dict[str, Any]) -> None:
        """Replaces the adapters with which all further requests are computed; none may be in flight.

        Args:
            payloads: payloads of `Staging` with all whole tensors by PEFT's names, one for each process that opens
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
    async def pause(self) -> None:
        """Stops generation between two tokens, for an update of the weights with requests in flight."""

    @abstractmethod
    async def unpause(self) -> None:
        """Continues generation after `pause`."""

    @abstractmethod
    async def chosen(self) -> dict[str, str]:
        """Returns what the started engine computes with, by part."""

    @abstractmethod
    async def size(self) -> dict[str, int]:
        """Returns the size of the started engine.

        Returns:
            max_running, the largest number of requests at the same time, and cache_tokens, of the key-value cache.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the engine's processes."""

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener: EngineListener | None
    ) -> None:
        """Serves the messages of the rank, and of further ranks that come after it was lost."""
        if listener is None:
            await self._serve_rank(reader, writer, 0)
            return
        self._ledger = RequestLedger()
        work = asyncio.ensure_future(self._serve_ranks(reader, writer, listener))
        # Without its launcher no further rank can come, and the engine would keep the devices.
        await asyncio.wait(
            {work, asyncio.ensure_future(listener.until_launcher_ends())}, return_when=asyncio.FIRST_COMPLETED
        )
        if work.done():
            work.result()  # raises what has ended it

    async def _serve_ranks(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener: EngineListener
    ) -> None:
        ranks = listener.ranks()
        # Consumes ranks: serves one to the end of its stream, then waits for the next. Ends by {"end"}, or when no
        # further rank comes.
        while await self._serve_rank(reader, writer, listener.attachment.pid):
            await self._part_from_rank()
            # The rank that resumes from a checkpoint computes other weights under the same version numbers.
            self._drops_newer = not self.options.deterministic
            try:
                reader, writer = await anext(ranks)
            except StopAsyncIteration:
                return

    async def _serve_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> bool:
        """Serves the messages of a rank; returns whether its stream has ended without a request to end."""
        self._writer = writer
        self._num_ranks += 1
        chosen = await self.chosen()
        state: dict[str, Any] = {"version": self._version, "asleep": sorted(self._asleep), "chosen": chosen}
        self._send(ready=True, pid=pid, size=await self.size(), **state)
        with contextlib.suppress(ConnectionError):
            # Consumes messages, and does not wait for their work: each starts a task. Ends by {"end"} or the stream.
            while line := await reader.readline():
                message = json.loads(line)
                if "end" in message:
                    return False
                self._handle(message)
        return True

    async def _part_from_rank(self) -> None:
        assert self._writer and self._ledger
        self._writer.close()
        self._writer = None
        self._rids.clear()
        if self._is_paused:  # the rank was lost during an update
            await self.unpause()
            self._is_paused = False
        if self.options.sleeps and self._asleep != {"weights", "kv"}:
            await self._apply("sleep", {"weights": True, "kv": True, "timeout_s": PART_SECONDS})
        self._ledger.hand_over()

    async def abort_until_sent(self, rid: str | None) -> None:
        """Aborts requests until they are complete: an abort that overtakes its request has no effect."""
        targets = set(self.open_requests) if rid is None else {rid}
        while targets & self.open_requests:
            self.abort(rid)
            await asyncio.sleep(ABORT_RETRY_SECONDS)

    def _handle(self, message: dict[str, Any]) -> None:
        if "generate" in message:
            self._generate(RequestBatch(**message["generate"]))
        elif "abort" in message:
            self._start(self.abort_until_sent(self._rids.get(message["abort"], message["abort"])))
        else:
            self._start(self._call(message["call"], message["method"], message["fields"]))

    def _send(self, **message: Any) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _generate(self, batch: RequestBatch) -> None:
        """Starts requests, but those that an earlier rank has started already."""
        requests, generations = batch.requests(), dict[str, Generation]()
        keys = dict.fromkeys(requests, "")
        if self._ledger:
            if self._drops_newer:  # the first requests are under the weights of the checkpoint
                self._ledger.drop_newer(self._version)
                self._drops_newer = False
            keys = batch.keys(self._version)
            generations = {rid: kept for rid, key in keys.items() if (kept := self._ledger.take(key))}
        if new := [rid for rid in requests if rid not in generations]:
            # Ranks use the same ids.
            unique = {rid: rid if self._num_ranks == 1 else f"{self._num_ranks}-{rid}" for rid in new}
            self.open_requests.update(unique.values())
            started = self._start(self.generate({unique[rid]: requests[rid] for rid in new}))
            for rid in new:
                task = self._start(self._result(unique[rid], started))
                generations[rid] = Generation(unique[rid], keys[rid], self._version, task, self._version >= 0)
                if self._ledger:
                    self._ledger.add(generations[rid])
        for rid in requests:
            self._rids[rid] = generations[rid].rid
            generations[rid].task.add_done_callback(partial(self._add_result, self._num_ranks, rid))

    async def _result(self, rid: str, started: Awaitable[Mapping[str, Awaitable[Result]]]) -> Result:
        try:
            return await (await started)[rid]
        except Exception as error:  # the engine rejects a request, or ends one that never started
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            self.open_requests.discard(rid)

    def _add_result(self, rank: int, rid: str, task: asyncio.Task[Result]) -> None:
        if rank != self._num_ranks:  # the rank that has requested it was lost meanwhile
            return
        self._rids.pop(rid, None)
        if not self._results:  # requests that a step of the engine completes are done before the next turn of the loop
            asyncio.get_running_loop().call_soon(self._send_results)
        self._results[rid] = task.result()

    def _send_results(self) -> None:
        results, self._results = self._results, {}
        self._send(samples=results)

    async def _call(self, number: int, method: str, fields: dict[str, Any]) -> None:
        ok, text, rank = True, "", self._num_ranks
        try:
            if method not in METHODS:
                raise ValueError(f"no such method: {method}")
            await self._apply(method, fields)
        except Exception as error:
            ok, text = False, f"{type(error).__name__}: {error}"
        if rank == self._num_ranks:
            self._send(call=number, ok=ok, message=text)

    async def _apply(self, method: str, fields: dict[str, Any]) -> None:
        """Calls a method, and keeps the state that the next rank needs."""
        if self._ledger and method not in KEEPS_REQUESTS:
            for orphan in self._ledger.orphans():  # no rank waits for them
                await self.abort_until_sent(orphan.rid)
        if method in CHANGES_WEIGHTS:
            self._version = -1  # until the last payloads the weights are a mixture, which no rank may take over
            if self._ledger:
                self._ledger.drop_unfinished()
        await getattr(self, method)(**fields)
        if fields.get("version") is not None:
            self._version = fields["version"]
        elif method in ("pause", "unpause"):
            self._is_paused = method == "pause"
        elif method in ("sleep", "wake"):
            parts = {part for part in ("weights", "kv") if fields[part]}
            self._asleep = self._asleep | parts if method == "sleep" else self._asleep - parts
            if method == "sleep" and fields["weights"]:
                self._version = -1


def main(create: Callable[[dict[str, Any], EngineOptions, asyncio.AbstractEventLoop], Host], imported: str) -> None:
    """Main function of an engine process: serves messages until the stream ends.

    `create` starts the engine from its arguments and options; the event loop does not run yet. The module `imported` of
    the engine is imported before they arrive.
    """
    importlib.import_module(imported)
    connection = socket.socket(fileno=int(sys.argv[1]))
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # SGLang's tokenizer manager uses the current event loop
    reader, writer = loop.run_until_complete(asyncio.open_connection(sock=connection, limit=LINE_LIMIT))
    line = loop.run_until_complete(reader.readline())
    if not line:  # the rank has ended, or has found an engine
        return
    first = json.loads(line)
    # Before the engine starts: a rank that resumes meanwhile waits at the socket instead of starting another engine.
    listener = EngineListener(EngineAttachment(**first["attachment"]), LINE_LIMIT) if first["attachment"] else None
    host = create(first["arguments"], EngineOptions.from_json(first["options"]), loop)
    gc.freeze()  # a full collection would look at all that the engine's libraries have made
    try:
        loop.run_until_complete(host.serve(reader, writer, listener))
    finally:
        host.shutdown()
        # Threads of the engine may still wait for processes that have ended.
        os._exit(0)
