"""HTTP server of the agents' endpoint: one URL per session, keys, limits and errors.

    client of the agent            thread "agent-server", one event loop
    POST /sessions/ID/v1/... ----> _endpoint   key of the session; then the body is read, and the key checked again
                                   ChatApi.read --> Exchange, with the Call
                                   task _reply --> Sessions.complete(Call)       waits for the engine
    JSON, or events <------------- Exchange.body, Exchange.events <-- Reply

Agents are code of users and may block, so they run in another thread with its own loop. The task of a reply continues
where the client disconnects, since its tokens are part of the sample. The thread runs until the process ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from socket import AF_INET, AF_INET6, create_server
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from verl_mg.agents.agent import POLICY
from verl_mg.agents.call import Reply, RequestError
from verl_mg.agents.protocols import ChatApi, Exchange, JsonObject
from verl_mg.agents.protocols.chat_completions import ChatCompletions
from verl_mg.agents.protocols.fields import parse
from verl_mg.agents.protocols.messages import Messages
from verl_mg.agents.protocols.responses import Responses
from verl_mg.agents.sessions import OpenSession, Sessions

MAX_BODY = 32 << 20  # largest size of a request's body, bytes
KEEP_ALIVE_S = 10.0  # seconds between signs of life in a stream; clients give up after 60 to 300 seconds of silence
# Seconds after which an idle connection is closed: later than any client does, or its next request would fail.
IDLE_CONNECTION_S = 3600
EVENT_STREAM: Any = {"headers": {"cache-control": "no-cache"}, "media_type": "text/event-stream"}
CHAT, RESPONSES, MESSAGES = ChatCompletions(), Responses(), Messages()


class AgentServer:
    """An HTTP server in a thread with its event loop, in which `sessions` answer, at a free port of `host`.

    `on_error` gets unexpected exceptions, in the server's thread, and their requests status 500. `/v1/models` lists
    the agents with names, or POLICY; then requests may name others.
    """

    def __init__(self, sessions: Sessions, host: str, on_error: Callable[[BaseException], None]) -> None:
        self._sessions, self._on_error = sessions, on_error
        # asyncio refers to tasks only weakly.
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
        )
        self._server = uvicorn.Server(config)
        threading.Thread(target=self._serve, args=([socket],), name="agent-server", daemon=True).start()

    def _serve(self, sockets: list[Any]) -> None:
        try:
            with asyncio.Runner(loop_factory=_new_loop) as runner:
                runner.run(self._server.serve(sockets))
        except Exception as error:
            self._on_error(error)

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
        self, work: Callable[[Request, ChatApi, OpenSession], Awaitable[Response]], api: ChatApi
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                # Before the body is read, which may have MAX_BODY bytes.
                session = self._sessions.authorize(request.path_params["session"], _key(request))
                return await work(request, api, session)
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

    async def _complete(self, request: Request, api: ChatApi, session: OpenSession) -> Response:
        exchange = api.read(parse(await _body(request)), session.memory)
        # The reply is part of the session also when the client disconnects: the task does not depend on the request's.
        task = asyncio.create_task(self._reply(session, exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # asyncio would log the exception of a task whose result is not read, as after a disconnect of the client.
        task.add_done_callback(asyncio.Task.exception)
        # An error before the stream begins is an HTTP status; afterwards it can only be an event.
        done, _ = await asyncio.wait([task], timeout=KEEP_ALIVE_S if exchange.stream else None)
        if not done:
            return StreamingResponse(_late_events(exchange, task), **EVENT_STREAM)
        body = task.result()
        if not exchange.stream:
            return JSONResponse(body)
        return Response(b"".join(exchange.events(body)), **EVENT_STREAM)

    async def _reply(self, session: OpenSession, exchange: Exchange) -> JsonObject:
        try:
            return exchange.body(_encodable(await self._sessions.complete(session, exchange.call)))
        except RequestError:
            raise
        except Exception as error:
            raise self._unexpected(error) from None

    async def _count(self, request: Request, api: ChatApi, session: OpenSession) -> Response:
        call = MESSAGES.read_context(parse(await _body(request)), session.memory)
        return JSONResponse({"input_tokens": self._sessions.count_tokens(session, call)})

    async def _list_models(self, request: Request, api: ChatApi, session: OpenSession) -> Response:
        names = self._sessions.agents or (POLICY,)
        page = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return JSONResponse({"object": "list", "data": [_model(name) for name in names]} | page)

    async def _show_model(self, request: Request, api: ChatApi, session: OpenSession) -> Response:
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
        body = task.result()
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
