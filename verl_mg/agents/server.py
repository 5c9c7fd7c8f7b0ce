"""HTTP server of the agents' endpoint: one URL per session, keys, limits and errors.

    client of the agent            thread "agent-server", one event loop
    POST /sessions/ID/v1/... ----> _endpoint   key of the session; then the body is read, and the key checked again
                                   ChatApi.read --> Exchange, with the Call
                                   task _reply --> Backend.complete(Call)        waits for the engine
    JSON, or events <------------- Exchange.body, Exchange.events <-- Reply

Agents are code of users and may block, so they run in another thread with its own loop. The task of a reply continues
where the client disconnects, since its tokens are part of the sample; `close` cancels it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from socket import AF_INET, AF_INET6, create_server
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from verl_mg.agents.agent import POLICY
from verl_mg.agents.call import Call, Reply, RequestError
from verl_mg.agents.protocols import ChatApi, Exchange, JsonObject
from verl_mg.agents.protocols.chat_completions import ChatCompletions
from verl_mg.agents.protocols.fields import parse
from verl_mg.agents.protocols.memory import SessionMemory
from verl_mg.agents.protocols.messages import Messages
from verl_mg.agents.protocols.responses import Responses
from verl_mg.data.images import ImageLimits

MAX_BODY = 32 << 20  # largest size of a request's body, bytes
KEEP_ALIVE_S = 10.0  # seconds between signs of life in a stream; clients give up after 60 to 300 seconds of silence
# Seconds after which an idle connection is closed: later than any client does, or its next request would fail.
IDLE_CONNECTION_S = 3600
EVENT_STREAM: Any = {"headers": {"cache-control": "no-cache"}, "media_type": "text/event-stream"}
CHAT, RESPONSES, MESSAGES = ChatCompletions(), Responses(), Messages()


class Backend(Protocol):
    """Source of the replies. Its coroutines run in the server's event loop, and raise `RequestError` for the client.

    `session` is the id in the URL, `key` the one in the headers, "" where there is none.
    """

    def authorize(self, session: str, key: str) -> None:
        """Raises `RequestError` with status 404 for an unknown session, 401 for a wrong key."""

    async def complete(self, session: str, call: Call) -> Reply:
        """Returns the policy's reply, after `authorize`. It runs to its end also when the client disconnects."""

    async def count_tokens(self, session: str, call: Call) -> int:
        """Returns the number of tokens that would be in front of the reply."""


class AgentServer:
    """An HTTP server in a thread with its event loop, at a free port of `host`.

    `on_error` gets unexpected exceptions, in the server's thread, and their requests status 500. `/v1/models` lists
    POLICY; requests may name others. Without `image_limits` the policy reads text only.
    """

    def __init__(
        self,
        backend: Backend,
        host: str,
        on_error: Callable[[BaseException], None],
        image_limits: ImageLimits | None = None,
    ) -> None:
        self._backend, self._on_error, self._image_limits = backend, on_error, image_limits
        self._memories: dict[str, SessionMemory] = {}
        # asyncio refers to tasks only weakly, and `close` has to cancel them.
        self._tasks: set[asyncio.Task[JsonObject]] = set()
        socket = create_server((host, 0), family=AF_INET6 if ":" in host else AF_INET, backlog=1024)
        # Clients cannot connect to an address that stands for all interfaces.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        # Address without a path.
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{socket.getsockname()[1]}"
        config = uvicorn.Config(
            self._application(),
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=IDLE_CONNECTION_S,
            timeout_graceful_shutdown=5,
        )
        self._server = uvicorn.Server(config)
        self.loop = _new_loop()  # the backend's coroutines run in it
        self._thread = threading.Thread(target=self._serve, args=([socket],), name="agent-server", daemon=True)
        self._thread.start()

    def _serve(self, sockets: list[Any]) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._server.serve(sockets))
        except Exception as error:
            self._on_error(error)

    def close(self) -> None:
        """Ends running requests with status 503, and the thread. A second call does nothing."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just been closed
                self.loop.call_soon_threadsafe(self._stop)
            self._thread.join()

    def _stop(self) -> None:
        self._server.should_exit = True
        for task in self._tasks:
            task.cancel()

    def forget(self, session: str) -> None:
        """Drops the memory of a session that has ended; called in the server's loop."""
        self._memories.pop(session, None)

    def _application(self) -> Starlette:
        base = "/sessions/{session}/v1"
        application = Starlette(
            routes=[
                Route(f"{base}/chat/completions", self._endpoint(self._complete, CHAT), methods=["POST"]),
                Route(f"{base}/responses", self._endpoint(self._complete, RESPONSES), methods=["POST"]),
                Route(f"{base}/messages", self._endpoint(self._complete, MESSAGES), methods=["POST"]),
                Route(f"{base}/messages/count_tokens", self._endpoint(self._count, MESSAGES), methods=["POST"]),
                Route(f"{base}/models", self._endpoint(self._list_models, CHAT)),
                Route(f"{base}/models/{{name:path}}", self._endpoint(self._show_model, CHAT)),
            ],
            exception_handlers={HTTPException: _http_error},
        )
        application.router.redirect_slashes = False  # clients do not follow a redirection of POST
        return application

    def _endpoint(
        self, work: Callable[[Request, ChatApi], Awaitable[Response]], api: ChatApi
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                # Before the body is read, which may have MAX_BODY bytes.
                self._backend.authorize(request.path_params["session"], _key(request))
                return await work(request, api)
            except RequestError as error:
                return _error_response(api, error)
            except ClientDisconnect:
                return Response(status_code=499)  # goes nowhere
            except Exception as error:
                return _error_response(api, self._unexpected(error))

        return endpoint

    def _unexpected(self, error: Exception) -> RequestError:
        self._on_error(error)
        return RequestError(500, "server: unexpected error. See the log of the job.", code="server_error")

    async def _complete(self, request: Request, api: ChatApi) -> Response:
        session = request.path_params["session"]
        exchange = api.read(await self._json(request), self._memory(session))
        # The reply is part of the session also when the client disconnects: the task does not depend on the request's.
        task = self.loop.create_task(self._reply(session, _key(request), exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # asyncio would log the exception of a task whose result is not read, as after a disconnect of the client.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # An error before the stream begins is an HTTP status; afterwards it can only be an event.
        done, _ = await asyncio.wait([task], timeout=KEEP_ALIVE_S if exchange.stream else None)
        if not done:
            return StreamingResponse(_late_events(exchange, task), **EVENT_STREAM)
        body = _result(task)
        if not exchange.stream:
            return JSONResponse(body)
        return Response(b"".join(exchange.events(body)), **EVENT_STREAM)

    async def _reply(self, session: str, key: str, exchange: Exchange) -> JsonObject:
        try:
            self._backend.authorize(session, key)
            return exchange.body(_encodable(await self._backend.complete(session, exchange.call)))
        except RequestError:
            raise
        except Exception as error:
            raise self._unexpected(error) from None

    async def _json(self, request: Request) -> Any:
        data = await _body(request)
        self._backend.authorize(request.path_params["session"], _key(request))  # it may have ended in the meantime
        return parse(data)

    def _memory(self, session: str) -> SessionMemory:
        # Only after `authorize`: `forget` has dropped the memory of a session that has ended.
        return self._memories.setdefault(session, SessionMemory(self._image_limits))

    async def _count(self, request: Request, api: ChatApi) -> Response:
        session = request.path_params["session"]
        call = MESSAGES.read_context(await self._json(request), self._memory(session))
        return JSONResponse({"input_tokens": await self._backend.count_tokens(session, call)})

    async def _list_models(self, request: Request, api: ChatApi) -> Response:
        page = {"first_id": POLICY, "last_id": POLICY, "has_more": False}
        return JSONResponse({"object": "list", "data": [_model(POLICY)]} | page)

    async def _show_model(self, request: Request, api: ChatApi) -> Response:
        return JSONResponse(_model(request.path_params["name"]))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _encodable(reply: Reply) -> Reply:
    """Returns the reply without halves of surrogate pairs, which a policy may write as an escape in JSON."""

    def encodable(text: str) -> str:
        return text.encode("utf-8", "replace").decode()

    calls = (replace(call, name=encodable(call.name), arguments=encodable(call.arguments)) for call in reply.tool_calls)
    return replace(reply, text=encodable(reply.text), reasoning=encodable(reply.reasoning), tool_calls=tuple(calls))


def _key(request: Request) -> str:
    # Clients of OpenAI send a bearer token, Anthropic's the header x-api-key.
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def _body(request: Request) -> bytes:
    announced = request.headers.get("content-length", "0")
    too_large = RequestError(413, f"body: larger than {MAX_BODY >> 20} MiB. Send a shorter conversation.")
    if announced.isdecimal() and int(announced) > MAX_BODY:
        raise too_large
    # A body that is sent in chunks announces no length.
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY:
            raise too_large
    return bytes(data)


def _result(task: asyncio.Task[JsonObject]) -> JsonObject:
    if task.cancelled():
        raise RequestError(503, "server: it is being stopped. Nothing can be generated any more.")
    return task.result()


async def _late_events(exchange: Exchange, task: asyncio.Task[JsonObject]) -> AsyncIterator[bytes]:
    """Yields the events of a reply that is not complete when the stream begins, so that an error is an event too.

    Waits for the task of the reply and writes a sign of life every KEEP_ALIVE_S; ends with the reply or its error.
    """
    earlier = 0
    while not task.done():
        yield exchange.keep_alive(earlier)
        earlier += 1
        await asyncio.wait([task], timeout=KEEP_ALIVE_S)
    try:
        body = _result(task)
    except RequestError as error:
        yield exchange.error_event(error, earlier)
    else:
        for event in exchange.events(body, earlier):
            yield event


def _error_response(api: ChatApi, error: RequestError) -> Response:
    return JSONResponse(api.error(error), error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    wrong = {404: f"{path}: unknown path", 405: f"{path}: {request.method} is not supported"}
    text = wrong.get(error.status_code, f"{path}: {error.detail}")
    is_anthropic = "/messages" in path or "anthropic-version" in request.headers
    refused = RequestError(error.status_code, f"{text}. See the documentation of agents.")
    return _error_response(MESSAGES if is_anthropic else CHAT, refused)


def _model(name: str) -> JsonObject:
    """A model in the form of both OpenAI and Anthropic, whose fields have different names."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "verl_mg",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
    }
