"""An SGLang server that somebody else has started, `python -m sglang.launch_server`, as a rollout engine over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from verl_mg.errors import UserError
from verl_mg.http_client import JsonSession, RefusedError, UnreachableError
from verl_mg.rollout.engine import EngineDiedError
from verl_mg.rollout.sglang.request_tracker import EngineLimits, RequestTracker, parse_response
from verl_mg.rollout.sglang.server_info import ASK_SECONDS, ServerRequirements, check, describe, probe_server

T = TypeVar("T")

BACK_SECONDS = 600.0
"""How long a server that went away may take to come back: a large model is loaded in minutes."""
UPDATE_SECONDS = 1800.0
"""How long a server may take to load weights."""
AGAIN_SECONDS = 0.5
"""Between two attempts at something that may be repeated."""


class RemoteEngine(RequestTracker):
    """The server at `url`, which must be what `demand` asks for; its weights come from here.

    `max_running`: at most so many requests at once, fewer where the server says so.
    When the server goes away, methods raise `EngineDiedError`; then `restart`, bring the weights, `resume`.
    Raises UserError naming URL and remedy where no such server answers.
    """

    def __init__(
        self, url: str, demand: ServerRequirements, *, max_running: int = 256, request_timeout: float = 3600.0
    ) -> None:
        self.info = probe_server(url, demand)
        self._client, self._demand = JsonSession(url), demand
        self.url = self._client.url
        limits = EngineLimits(
            max_running=min(max_running, self.info.max_running),
            max_positions=min(demand.model.max_positions, self.info.context),
            seeded=self.info.seeded,
            routed=demand.routed,
        )
        super().__init__(limits, request_timeout)
        self._inbox: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._open: set[str] = set()  # touched by the client's thread alone
        self._clear()

    # -- life

    def restart(self) -> None:
        """Wait until the server is back; what was unfinished waits for `resume`. UserError if that takes too long."""
        self.arrive()
        self._version = -1
        self._clear()

    def arrive(self) -> str:
        """Wait until the server answers; which start of it this is. UserError after `BACK_SECONDS`."""
        until = time.monotonic() + BACK_SECONDS
        while True:
            try:
                self.info = self._talk(describe(self._client))
            except UnreachableError as error:
                if time.monotonic() > until:
                    raise UserError(
                        f"{self.url}: the server went away and is not back after {BACK_SECONDS:.0f} s ({error}); "
                        "start it again, then the job"
                    ) from None
                time.sleep(AGAIN_SECONDS)
                continue
            check(self.url, self.info, self._demand)
            return self.info.start

    def close(self) -> None:
        """Let go of the server, which goes on."""
        self._client.close()

    def health(self) -> bool:
        """Whether there are weights."""
        return self._version >= 0

    def _clear(self) -> None:
        """End what a job before, or this one before the server was lost, has left in it."""
        with contextlib.suppress(RefusedError, UnreachableError):
            self._talk(self._client.post("/abort_request", {"abort_all": True}, ASK_SECONDS))
            # Refused if none is open, which is the rule.
            self._talk(self._client.post("/end_weight_update", {}, UPDATE_SECONDS))

    def _talk(self, work: Coroutine[Any, Any, T]) -> T:
        return self._client.start(work).result()

    # -- samples

    def abort(self) -> None:
        """See `RolloutEngine`."""
        for rid in list(self._running):
            self._cut(rid)

    def _generate(self, rid: str, fields: dict[str, Any]) -> None:
        self._client.start(self._answer(rid, fields))

    async def _answer(self, rid: str, fields: dict[str, Any]) -> None:
        self._open.add(rid)
        try:
            answer = parse_response(await self._client.post("/generate", fields | {"rid": rid}, timeout=None))
            if not all(span["version"].isdigit() for span in answer["spans"]):
                answer = {"lost": "it was started anew, and has not the weights of this job"}
        except UnreachableError as error:
            answer = {"lost": str(error)}
        except RefusedError as error:
            answer = {"lost" if error.status >= 500 else "error": str(error)}
        self._open.discard(rid)
        self._inbox.put((rid, answer))

    def _cut(self, rid: str) -> None:
        self._client.start(self._abort(rid))

    async def _abort(self, rid: str) -> None:
        """Again and again: an abort that overtakes its request finds nothing to abort."""
        while rid in self._open:
            with contextlib.suppress(UnreachableError, RefusedError):
                await self._client.post("/abort_request", {"rid": rid}, ASK_SECONDS)
            await asyncio.sleep(AGAIN_SECONDS)

    def _receive(self, timeout: float) -> None:
        rid, answer = self._inbox.get(timeout=timeout)
        # What comes of requests that were asked again under another name is of no interest.
        if "lost" in answer and rid in self._running:
            self._version = -1
            raise EngineDiedError(f"the server {self.url} is lost: {answer['lost']}")
        self._answered(rid, answer)

    # -- weights

    def load_folder(self, folder: Path, version: int) -> None:
        """Have the server load a Hugging Face directory, by a path that both sides see, as weights `version`."""
        body = {"model_path": str(folder), "load_format": "auto", "weight_version": str(version), "flush_cache": True}
        self.wait(self._change("/update_weights_from_disk", body))
        self._version = version

    def join_group(self, name: str, address: str, port: int, first: int, ranks: int, backend: str) -> Future[None]:
        """Begin to make the server's ranks those from `first` on of a process group; `wait` for it."""
        body = {
            "group_name": name,
            "master_address": address,
            "master_port": port,
            "rank_offset": first,
            "world_size": ranks,
            "backend": backend,
        }
        return self._change("/init_weights_update_group", body)

    def leave_group(self, name: str) -> Future[None]:
        """Begin to let the group go; refused by a server that was started anew since."""
        return self._change("/destroy_weights_update_group", {"group_name": name})

    def begin_update(self) -> None:
        """Open the weights for writing; nothing may be in flight."""
        self.wait(self._change("/begin_weight_update", {}))

    def receive(
        self,
        group: str,
        names: Iterable[str],
        dtypes: Iterable[str],
        shapes: Iterable[Sequence[int]],
        version: int | None,
    ) -> Future[None]:
        """Begin to take tensors that follow each other in one broadcast of bytes; `wait` for it.

        `version` comes with the last ones: the cache of the old weights is flushed with them.
        """
        body: dict[str, Any] = {
            "group_name": group,
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "load_format": "flattened_bucket",
            "flush_cache": version is not None,
        }
        if version is not None:
            body["weight_version"] = str(version)
        return self._change("/update_weights_from_distributed", body)

    def end_update(self, version: int) -> None:
        """Take the weights into use as number `version`."""
        self.wait(self._change("/end_weight_update", {}))
        self._version = version

    def wait(self, change: Future[None]) -> None:
        """Until the server has done it. UserError where it could not."""
        try:
            change.result()
        except RefusedError as error:
            raise UserError(f"{self.url}: the server (SGLang {self.info.version}) takes no weights: {error}") from None
        except UnreachableError as error:
            raise UserError(
                f"{self.url}: the server went away while it took weights ({error}); start it again, then the job"
            ) from None

    def _change(self, path: str, body: dict[str, Any]) -> Future[None]:
        return self._client.start(self._succeed(path, body))

    async def _succeed(self, path: str, body: dict[str, Any]) -> None:
        content = await self._client.post(path, body, UPDATE_SECONDS)
        if not (isinstance(content, dict) and content.get("success") is True):
            raise RefusedError(200, f"{path}: {content}")
