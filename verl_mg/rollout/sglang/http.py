"""JSON to a server and back: coroutines of httpx on a loop in one daemon thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx

T = TypeVar("T")

CONNECT_SECONDS = 10.0
CONNECT_RETRIES = 3
"""With pauses of 0, 0.5 and 1 s; nothing has been sent yet, so nothing is sent twice."""


KEEP_ALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))
"""Seconds, seconds, and a number, where the system has them: a machine that is gone without a word is noticed so."""


class UnreachableError(Exception):
    """The server did not answer, or ended the connection before it had; the message says how."""


class RefusedError(Exception):
    """The server answered that it will not; the message is its own. `status` is that of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpClient:
    """Speaks to one server. What begins with `start` runs in the thread; `get` and `post` are coroutines for it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name=f"http-{self.url}")
        self._thread.start()
        # A connection that is kept, and that the server closes just then, would look like a server that is gone.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(
            retries=CONNECT_RETRIES, limits=limits, trust_env=False, socket_options=_keep_alive()
        )
        self._client = httpx.AsyncClient(base_url=self.url, transport=transport, trust_env=False)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine in the thread; from any thread, and in the order of the calls."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def get(self, path: str, timeout: float) -> Any:
        """The JSON at `path`, within `timeout` seconds. UnreachableError; RefusedError."""
        return await self._exchange("GET", path, None, timeout)

    async def post(self, path: str, body: dict[str, Any], timeout: float | None) -> Any:
        """The JSON that answers `body`, within `timeout` seconds (None: ever). UnreachableError; RefusedError."""
        return await self._exchange("POST", path, body, timeout)

    def close(self) -> None:
        """Let go of what runs, and end the thread."""
        self.start(self._cancel()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    async def _exchange(self, method: str, path: str, body: dict[str, Any] | None, timeout: float | None) -> Any:
        limits = httpx.Timeout(timeout, connect=CONNECT_SECONDS)
        try:
            response = await self._client.request(method, path, json=body, timeout=limits)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise UnreachableError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None
        try:
            content = response.json() if response.content else None
        except ValueError:
            raise RefusedError(response.status_code, f"{path} answers what is not JSON") from None
        if response.is_error:
            raise RefusedError(response.status_code, f"{path}: {_message(content)}")
        return content


def _keep_alive() -> list[tuple[int, int, int]]:
    known = [(socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in KEEP_ALIVE if hasattr(socket, name)]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *known]


def _message(content: Any) -> str:
    """What an error of SGLang or FastAPI says."""
    if not isinstance(content, dict):
        return str(content)
    inner = content.get("error", content.get("message", content.get("detail", content)))
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
