"""SGLang server that the user has started with `python -m sglang.launch_server`, as a rollout engine over HTTP.

    rank's threads                                          thread of `JsonSession`, an event loop for the client
    submit, abort_samples: client.start(coroutine)  ---->   _post_request: POST /generate, until the response
    collect: _receive <---- inbox <----------------------   puts (rid, result), then calls `on_arrival`
    weights, pauses: client.start(...).result()     ---->   POST; the calling thread waits

A server that does not answer, or has other weights than this job has sent, is lost: `EngineDiedError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from verl_mg.data.image_processor import ImageProcessor
from verl_mg.engines.engine import EngineDiedError, Request, Sample, Sampling
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.reports import ReportRules
from verl_mg.engines.request_batch import RequestBatch
from verl_mg.engines.request_tracker import EngineLimits, RequestTracker
from verl_mg.engines.sglang.folder_receiver import FolderRequest
from verl_mg.engines.sglang.host import image_fields, load_counts, parse_response, request_fields
from verl_mg.engines.sglang.shard_receiver import RECEIVER, ShardRequest
from verl_mg.errors import UserError
from verl_mg.http_client import JsonSession, RefusedError, UnreachableError
from verl_mg.servers.info import NO_KEYS, QUERY_SECONDS, ServerKeys, ServerRequirements, check, describe, probe_server

T = TypeVar("T")

LOADS = "/v1/loads?include=core"  # path of the load of a server's schedulers
HEALTH_SECONDS = 20.0  # time limit of a server for saying that it runs
UPDATE_SECONDS = 1800.0  # time limit of a server for loading weights
# Request to continue generation. SGLang's way to free memory asks CUDA for figures, also on a machine without.
CONTINUE = {"torch_empty_cache": False}
# Field of updates: they fill the policy, and not a draft model, which has other weights.
TARGET = {"selector": "target"}
RETRY_SECONDS = 0.5
RESTARTED = "it was restarted, and does not have the weights of this job"


class RemoteEngine(RequestTracker):
    """Client of a server whose weights this job sends; UserError where it does not respond or fit the job.

    `options.max_running` is lowered to the server's limit. With `borrowed` another rank leads the server, and its
    requests are left as they are. `on_arrival` is called in the client's thread when a result has arrived.

    When the server is lost, methods raise `EngineDiedError`; then `take_unfinished` returns what another server is to
    generate, and `reconnect` tries to reach it again.
    """

    def __init__(
        self,
        url: str,
        requirements: ServerRequirements,
        options: EngineOptions,
        keys: ServerKeys = NO_KEYS,
        processor: ImageProcessor | None = None,
        *,
        borrowed: bool = False,
        on_arrival: Callable[[], None] = lambda: None,
    ) -> None:
        self.info = probe_server(url, requirements, keys)
        self._client, self._requirements = JsonSession(url, keys.headers), requirements
        self.url = self._client.url
        limits = EngineLimits(
            max_running=min(options.max_running or self.info.max_running, self.info.max_running),
            max_positions=min(requirements.model.max_positions, self.info.context),
            seeded=self.info.seeded,
            reads_text=self.info.reads_text,
            reports=ReportRules.of_model(self.url, requirements.model, requirements.routed is not None),
            request_timeout=options.request_timeout,
        )
        super().__init__(limits)
        self._inbox: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._open: set[str] = set()  # used only by the client's thread
        self._on_arrival, self._processor = on_arrival, processor
        self._keep_cache, self._is_paused = options.keep_cache, False
        if not borrowed:
            self._reset()

    @property
    def parts(self) -> tuple[RemoteEngine, ...]:
        """Clients of the servers that receive weights: this one."""
        return (self,)

    def num_cache_tokens(self) -> int:
        """Returns the size of the server's cache."""
        return self.info.cache_tokens

    def reconnect(self) -> None:
        """Connects to a server that was lost, and ends what it may still be doing; raises as `refresh`."""
        self._version = -1
        self.refresh()
        self._reset()

    def refresh(self) -> None:
        """Queries the server's properties again; EngineDiedError where it is lost, UserError where it does not fit."""
        self.info = self._run(describe(self._client, self.info, self._requirements.wire))
        check(self.url, self.info, self._requirements)

    def check_weights(self) -> None:
        """Checks that the server responds and has the weights that were sent last; EngineDiedError otherwise."""
        expected = str(self._version)
        model = self._run(self._client.get("/model_info", HEALTH_SECONDS))
        # A restarted server responds too, with the weights of its directory.
        if self._version >= 0 and model.get("weight_version") != expected:
            raise self._lost(RESTARTED)
        if self._running:
            with contextlib.suppress(EngineDiedError):  # versions of SGLang without this query refuse it
                reply = self._run(self._client.get(LOADS, HEALTH_SECONDS))
                self._counts.update(load_counts(reply["loads"]))

    def take_unfinished(self) -> list[tuple[Request, Sampling]]:
        """Implements `RequestTracker.take_unfinished`; a server that returns has no weights of this job."""
        self._version = -1
        return super().take_unfinished()

    def take_done(self) -> list[Sample]:
        """Returns the completed samples that `collect` has not returned."""
        done = list(self._done)
        self._done.clear()
        return done

    def close(self) -> None:
        """Disconnects from the server, which keeps running."""
        self._client.close()

    def health(self) -> bool:
        """Returns whether the weights have been sent."""
        return self._version >= 0

    def _lost(self, reason: object) -> EngineDiedError:
        return EngineDiedError(f"the server {self.url} is lost: {reason}")

    def _reset(self) -> None:
        """Ends requests and updates that were left by an earlier job, or by this one before the server was lost."""
        with contextlib.suppress(EngineDiedError):
            self._run(self._client.post("/abort_request", {"abort_all": True}, QUERY_SECONDS))
            # It may have been left in the middle of an update.
            self._run(self._client.post("/continue_generation", CONTINUE, QUERY_SECONDS))
            # Refused where no update is open, which is the usual case.
            self._run(self._client.post("/end_weight_update", {}, UPDATE_SECONDS))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return self._client.start(coroutine).result()
        except (UnreachableError, RefusedError) as error:
            raise self._lost(error) from None

    def abort(self) -> None:
        """Aborts all requests in flight."""
        for rid in list(self._running):
            self._abort_request(rid)

    def _generate(self, batch: RequestBatch) -> None:
        # One by one: a server answers a list of requests when the last one is complete.
        for rid, request in batch.requests().items():
            fields = request_fields(request)
            if request["images"] and self._processor:
                fields |= image_fields(request, self._processor)
            self._client.start(self._post_request(rid, fields, len(request["tokens"])))

    async def _post_request(self, rid: str, fields: dict[str, Any], prompt_tokens: int) -> None:
        self._open.add(rid)
        try:
            response = await self._exchange(fields | {"rid": rid})
            result = parse_response(response, fields.get("top_logprobs_num", 0))
            if "image_data" in fields and response["meta_info"].get("prompt_tokens", prompt_tokens) != prompt_tokens:
                result = {"error": "SGLang has put other placeholders in place of the images than their processor"}
            elif not all(span["version"].isdigit() for span in result["spans"]):
                result = {"lost": RESTARTED}
        except UnreachableError as error:
            result = {"lost": str(error)}
        except RefusedError as error:
            # Below 500 the request is at fault, and would be on every server.
            result = {"lost" if error.status >= 500 else "error": str(error)}
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            result = {"error": f"its response is not one of SGLang's: {type(error).__name__}: {error}"}
        self._open.discard(rid)
        self._inbox.put((rid, result))
        self._on_arrival()

    def _abort_request(self, rid: str) -> None:
        self._client.start(self._repeat_abort(rid))

    async def _repeat_abort(self, rid: str) -> None:
        # An abort that overtakes its request has no effect: repeats until the response has arrived (`_post_request`).
        while rid in self._open:
            with contextlib.suppress(UnreachableError, RefusedError):
                await self._send_abort(rid)
            await asyncio.sleep(RETRY_SECONDS)

    async def _exchange(self, body: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and returns the response."""
        # No time limit here: requests that take too long are aborted by `RequestTracker`.
        response: dict[str, Any] = await self._client.post("/generate", body, timeout=None)
        return response

    async def _send_abort(self, rid: str) -> None:
        await self._client.post("/abort_request", {"rid": rid}, QUERY_SECONDS)

    def start_exchange(self, body: dict[str, Any]) -> Future[dict[str, Any]]:
        """Starts to send a request that another client keeps track of; the result is the response."""
        return self._client.start(self._exchange(body))

    def start_abort(self, rid: str) -> Future[None]:
        """Starts to abort such a request."""
        return self._client.start(self._send_abort(rid))

    def _receive(self, timeout: float) -> None:
        rid, result = self._inbox.get(timeout=timeout)
        # Results of requests that were submitted again under another id are ignored.
        if "lost" in result and rid in self._running:
            self._version = -1
            raise self._lost(result["lost"])
        self._complete(rid, result)

    def load_folder(self, folder: Path, version: int) -> None:
        """Makes the server load a Hugging Face directory, by a path that it sees too."""
        body = {"model_path": str(folder), "load_format": "auto", "weight_version": str(version), "flush_cache": True}
        self.wait(self._post_change("/update_weights_from_disk", body))
        self._version = version

    def join_group(self, name: str, address: str, port: int, first: int, ranks: int, backend: str) -> Future[None]:
        """Starts to add the server's ranks, from rank `first` on, to a process group; pass the result to `wait`."""
        body = {
            "group_name": name,
            "master_address": address,
            "master_port": port,
            "rank_offset": first,
            "world_size": ranks,
            "backend": backend,
        }
        return self._post_change("/init_weights_update_group", body)

    def leave_group(self, name: str) -> Future[None]:
        """Starts to remove the group; refused by a server that was restarted since."""
        return self._post_change("/destroy_weights_update_group", {"group_name": name})

    def pause(self) -> None:
        """Stops generation between two tokens; see `ProcessEngine.pause`. EngineDiedError where the server is lost."""
        self._is_paused = True
        mode = {"mode": "in_place" if self._keep_cache else "retract"}
        self._run(self._client.post("/pause_generation", mode, UPDATE_SECONDS))

    def unpause(self) -> None:
        """Continues generation after `pause`; EngineDiedError where the server is lost."""
        self._run(self._client.post("/continue_generation", CONTINUE, UPDATE_SECONDS))
        self._is_paused = False

    @property
    def _flushes(self) -> bool:
        """Whether an update flushes the cache, which a paused server may have to keep."""
        return not (self._is_paused and self._keep_cache)

    def begin_update(self) -> None:
        """Begins an update of the weights; no requests may be in flight, unless the server is paused."""
        self.wait(self._post_change("/begin_weight_update", TARGET))

    def receive(
        self,
        group: str,
        names: Iterable[str],
        dtypes: Iterable[str],
        shapes: Iterable[Sequence[int]],
        version: int | None,
    ) -> Future[None]:
        """Starts to receive tensors that are concatenated in one broadcast of bytes; pass the result to `wait`.

        `version` comes with the last tensors of an update, which flush the cache unless a pause has to keep it.
        """
        body: dict[str, Any] = {
            "group_name": group,
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "load_format": "flattened_bucket",
            **TARGET,
            "flush_cache": version is not None and self._flushes,
        }
        if version is not None:
            body["weight_version"] = str(version)
        return self._post_change("/update_weights_from_distributed", body)

    def update_shards(self, request: ShardRequest | FolderRequest, version: int) -> Future[None]:
        """Starts a whole update in which all ranks receive their shards in place, or read what has changed in them.

        When it is complete the ranks have reported to the job, which then calls `confirm`.
        """
        return self._client.start(self._update_shards(request, version))

    async def _update_shards(self, request: ShardRequest | FolderRequest, version: int) -> None:
        body = {
            # One payload for each tensor-parallel rank; all stages read it.
            "serialized_named_tensors": [request.payload()] * self.info.tp,
            "load_format": RECEIVER,
            **TARGET,
            "flush_cache": self._flushes,
            "weight_version": str(version),
        }
        await self._checked_post("/begin_weight_update", TARGET)
        await self._checked_post("/update_weights_from_tensor", body)
        await self._checked_post("/end_weight_update", {})
        # SGLang recomputes derived weights (MLA's w_kc and w_vc) in a session without a load.
        await self._checked_post("/begin_weight_update", TARGET)
        await self._checked_post("/end_weight_update", {})

    def confirm(self, version: int) -> None:
        """Sets the version of the weights, which all ranks have received."""
        self._version = version

    def end_update(self, version: int) -> None:
        """Ends an update; the weights are policy version `version` from now on."""
        self.wait(self._post_change("/end_weight_update", {}))
        self._version = version

    def wait(self, change: Future[None]) -> None:
        """Waits for a change of the weights; EngineDiedError where the server is lost, UserError where it refuses."""
        try:
            change.result()
        except RefusedError as error:
            raise UserError(
                f"{self.url}: the server (SGLang {self.info.version}) does not accept the weights ({error}). "
                "See its log."
            ) from None
        except UnreachableError as error:
            raise self._lost(error) from None

    def _post_change(self, path: str, body: dict[str, Any]) -> Future[None]:
        return self._client.start(self._checked_post(path, body))

    async def _checked_post(self, path: str, body: dict[str, Any]) -> None:
        content = await self._client.post(path, body, UPDATE_SECONDS)
        if not (isinstance(content, dict) and content.get("success") is True):
            raise RefusedError(200, f"{path}: {content}")
