"""The process in which an `sglang.Engine` lives: `python -m verl_mg.rollout.sglang.engine_process SOCKET`.

Each line that comes over the inherited socket is a JSON object, each line that goes back too:

    {"arguments": {...}}                                          first; answered by {"ready": true}
    {"generate": ID, "fields": {...}}                             -> {"sample": ID, ...}, when it is done
    {"abort": ID}, {"abort": null}                                one request, all of them
    {"call": NUMBER, "method": NAME, "fields": {...}}             -> {"call": NUMBER, "ok": ..., "message": ...}

The end of the stream ends this process and SGLang's processes with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Coroutine
from typing import Any

from verl_mg.rollout.sglang.request_tracker import parse_response

LINE_LIMIT = 2**31
ABORT_AGAIN_SECONDS = 0.1


class EngineHost:
    """An engine, and the stream that it is spoken to over."""

    def __init__(self, engine: Any, writer: asyncio.StreamWriter) -> None:
        self._engine, self._manager, self._writer = engine, engine.tokenizer_manager, writer
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[str] = set()

    def obey(self, message: dict[str, Any]) -> None:
        """Begin what a line asks for."""
        if "generate" in message:
            self._open.add(message["generate"])
            self._start(self._generate(message["generate"], message["fields"]))
        elif "abort" in message:
            self._start(self._abort(message["abort"]))
        else:
            self._start(self._call(message["call"], message["method"], message["fields"]))

    def say(self, **message: Any) -> None:
        """Send a line."""
        self._writer.write(json.dumps(message).encode() + b"\n")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _generate(self, rid: str, fields: dict[str, Any]) -> None:
        try:
            answer = parse_response(await self._engine.async_generate(rid=rid, **fields))
        except Exception as error:  # SGLang refuses a request, or lets one that never began end so
            answer = {"error": f"{type(error).__name__}: {error}"}
        self._open.discard(rid)
        self.say(sample=rid, **answer)

    async def _abort(self, rid: str | None) -> None:
        """Again and again: an abort that overtakes its request finds nothing to abort."""
        meant = set(self._open) if rid is None else {rid}
        while meant & self._open:
            self._manager.abort_request(rid=rid or "", abort_all=rid is None)
            await asyncio.sleep(ABORT_AGAIN_SECONDS)

    async def _call(self, number: int, method: str, fields: dict[str, Any]) -> None:
        try:
            ok, text = await self._result(method, fields)
        except Exception as error:
            ok, text = False, f"{type(error).__name__}: {error}"
        self.say(call=number, ok=ok, message=text)

    async def _result(self, method: str, fields: dict[str, Any]) -> tuple[bool, str]:
        from sglang.srt.managers import io_struct

        if method == "flush_cache":
            flushed = await self._manager.flush_cache(**fields)
            return flushed.success, flushed.message
        kinds = {
            "begin_weight_update": io_struct.BeginWeightUpdateReqInput,
            "update_weights_from_tensor": io_struct.UpdateWeightsFromTensorReqInput,
            "end_weight_update": io_struct.EndWeightUpdateReqInput,
            "release_memory_occupation": io_struct.ReleaseMemoryOccupationReqInput,
            "resume_memory_occupation": io_struct.ResumeMemoryOccupationReqInput,
        }
        found = await getattr(self._manager, method)(kinds[method](**fields), None)
        # What has nothing to say of its success says nothing.
        return (bool(found[0]), str(found[1])) if found is not None else (True, "")


async def _serve(engine: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    host = EngineHost(engine, writer)
    host.say(ready=True)
    while line := await reader.readline():
        host.obey(json.loads(line))


def main() -> None:
    """See the module."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # SGLang's tokenizer manager takes this one
    reader, writer = loop.run_until_complete(asyncio.open_connection(sock=connection, limit=LINE_LIMIT))
    arguments = json.loads(loop.run_until_complete(reader.readline()))["arguments"]
    from verl_mg.rollout.sglang.scheduler import Engine

    engine = Engine(**arguments)
    try:
        loop.run_until_complete(_serve(engine, reader, writer))
    finally:
        engine.shutdown()
        # Threads of SGLang may still wait for processes that have gone.
        os._exit(0)


if __name__ == "__main__":
    main()
