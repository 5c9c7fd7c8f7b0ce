"""HTTP clients for JSON services: `JsonService` for rewards, with retries; `JsonSession` for an inference server.

JsonService   event loop of the caller, which may be another one for each call
JsonSession   any thread ── start(coroutine) ──▶ event loop in the thread "http-URL" ──▶ a connection per request
                         ◀──────── Future ──────
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_exponential

from verl_mg.errors import UserError

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the first retry, doubled for each further one; upper limit of the pause."""
LONGEST_RETRY_AFTER = 600.0  # seconds; a service whose `Retry-After` is longer counts as unavailable
# Statuses with `Retry-After`: RFC 6585, section 4, and RFC 9110, section 15.6.4.
TOO_MANY_REQUESTS, UNAVAILABLE = 429, 503

CONNECT_SECONDS = 10.0
CONNECT_RETRIES = 3
"""With pauses of 0, 0.5 and 1 s. Nothing has been sent before a connection exists, so no request is sent twice."""
KEEP_ALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))
"""TCP options (seconds, seconds, count), where the system has them: they detect a host that disappears silently."""


class _TransientError(Exception):
    """A failure after which a retry may succeed; `retry_after`: seconds that the service requests."""

    def __init__(self, problem: str, retry_after: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after = retry_after


class JsonService:
    """Client that posts JSON to one URL and retries failures that may be transient.

    These are: no connection, no response within `timeout` (seconds, of one attempt), a status of 500 or above, and
    status 429. `Retry-After` is respected. A header whose value begins with "$" names an environment variable, so that
    no file has a secret. `requests_per_second` limits this process; 0: no limit.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        retries: int,
        requests_per_second: float = 0.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"url: {url!r} is not an HTTP address. Write http://HOST:PORT/PATH or https://...")
        if timeout <= 0 or retries < 0 or requests_per_second < 0:
            raise UserError(
                f"{url}: timeout={timeout}, retries={retries}, requests_per_second={requests_per_second} is out of "
                "range. Set timeout to a positive number, and retries and requests_per_second to 0 or more."
            )
        self.url = url
        self._timeout, self._retries = timeout, retries
        extra = {name: _from_environment(name, value) for name, value in (headers or {}).items()}
        self._headers = {"Content-Type": "application/json"} | extra
        self._limiter = RateLimiter(requests_per_second) if requests_per_second else None
        self._tls = ssl.create_default_context()

    async def post(self, body: Mapping[str, Any], problem_of: Callable[[Any], str | None] = lambda _: None) -> Any:
        """Posts a body and returns the response; UserError after the last retry, also of a `problem_of` it."""
        content = json.dumps(body, allow_nan=False).encode()
        # A client belongs to one event loop, and the next call may come from another.
        async with httpx.AsyncClient(
            verify=self._tls, timeout=self._timeout, headers=self._headers, trust_env=False
        ) as client:
            retrying = AsyncRetrying(
                stop=stop_after_attempt(self._retries + 1),
                wait=_pause,
                retry=retry_if_exception_type(_TransientError),
                reraise=True,
            )
            try:
                return await retrying(self._attempt, client, content, problem_of)
            except _TransientError as error:
                raise UserError(
                    f"{self.url}: failed {self._retries + 1} times, the last time with {error}. "
                    "Check the service, or raise timeout or retries."
                ) from None

    async def _attempt(self, client: httpx.AsyncClient, content: bytes, problem_of: Callable[[Any], str | None]) -> Any:
        if self._limiter:
            await self._limiter.wait()
        try:
            # httpx limits each part of a request; a response that trickles in would never exceed its limit.
            response = await asyncio.wait_for(client.post(self.url, content=content), self._timeout)
        except (httpx.RequestError, TimeoutError) as error:
            raise _TransientError(str(error) or f"no response within {self._timeout:g} s") from None
        if response.status_code >= 500 or response.status_code == TOO_MANY_REQUESTS:
            problem = f"status {response.status_code}: {response.text[:200]!r}"
            raise _TransientError(problem, self._retry_after(response))
        result = self._parse(response)
        if (reason := problem_of(result)) is not None:
            raise _TransientError(reason)
        return result

    def _parse(self, response: httpx.Response) -> Any:
        if not response.is_success:
            raise UserError(
                f"{self.url}: refused with status {response.status_code}: {response.text[:200]!r}. "
                "Correct the URL, the headers or the service."
            )
        try:
            return response.json()
        except (ValueError, RecursionError):
            raise UserError(
                f"{self.url}: the response is not JSON: {response.text[:200]!r}. Fix the service."
            ) from None

    def _retry_after(self, response: httpx.Response) -> float:
        """Returns the seconds of the header `Retry-After`, which is a number of seconds or a date."""
        text = response.headers.get("retry-after", "")
        if response.status_code not in (TOO_MANY_REQUESTS, UNAVAILABLE) or not text:
            return 0.0
        try:
            date = None if text.isdigit() else email.utils.parsedate_to_datetime(text)
        except ValueError:
            return 0.0
        seconds = float(text) if date is None else date.timestamp() - time.time()
        if seconds > LONGEST_RETRY_AFTER:
            raise UserError(f"{self.url}: the service requests a pause of {seconds:.0f} s. Lower requests_per_second.")
        return seconds


class RateLimiter:
    """Token bucket of `rate` tokens per second for threads; aiolimiter's limiter belongs to one event loop."""

    def __init__(self, rate: float) -> None:
        self._rate, self._capacity = rate, max(1.0, rate)
        self._tokens, self._filled = self._capacity, time.monotonic()

    async def wait(self) -> None:
        """Waits for a token; callers that come while there is none get the next ones in order."""
        # A negative number is the queue: at 2 tokens per second the caller that makes it -3 sleeps for 1.5 s.
        now = time.monotonic()
        self._tokens = min(self._capacity, self._tokens + (now - self._filled) * self._rate) - 1
        self._filled = now
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / self._rate)


class UnreachableError(Exception):
    """The server did not respond, or ended the connection before it had; the message says how."""


class RefusedError(Exception):
    """The server responded with an error; the message is the server's and `status` the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class JsonSession:
    """Client of one server: httpx coroutines on an event loop in a daemon thread; only connecting is retried."""

    def __init__(self, url: str, headers_of: Callable[[str], Mapping[str, str]] = lambda path: {}) -> None:
        self.url, self._headers_of = url.rstrip("/"), headers_of
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name=f"http-{self.url}")
        self._thread.start()
        # A kept connection that the server closes at this moment would look like a server that is gone.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(
            retries=CONNECT_RETRIES, limits=limits, trust_env=False, socket_options=_keep_alive()
        )
        self._client = httpx.AsyncClient(base_url=self.url, transport=transport, trust_env=False)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine in the thread; callable from any thread. Coroutines start in the order of the calls."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def get(self, path: str, timeout: float) -> Any:
        """Returns the JSON at a path; `UnreachableError` or `RefusedError` where there is none."""
        return await self._request("GET", path, None, timeout)

    async def post(self, path: str, body: dict[str, Any], timeout: float | None) -> Any:
        """Posts a body and returns the JSON of the response; the same errors. Without `timeout` it waits for ever."""
        return await self._request("POST", path, body, timeout)

    def close(self) -> None:
        """Cancels running requests and ends the thread."""
        self.start(self._cancel()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel(self) -> None:
        # The client can be closed when no request uses it.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout: float | None) -> Any:
        # Generation may take an hour; a server that is there accepts a connection in seconds.
        limits = httpx.Timeout(timeout, connect=CONNECT_SECONDS)
        try:
            headers = self._headers_of(path)
            response = await self._client.request(method, path, json=body, timeout=limits, headers=headers)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise UnreachableError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None
        try:
            content = response.json() if response.content else None
        except ValueError:
            raise RefusedError(response.status_code, f"the response to {path} is not JSON") from None
        if response.is_error:
            raise RefusedError(response.status_code, f"{path}: {_error_message(content)}")
        return content


def _pause(state: RetryCallState) -> float:
    """Returns the seconds before the next try: exponential, and at least what the service requests."""
    pause = wait_exponential(multiplier=FIRST_PAUSE, max=LONGEST_PAUSE)(state)
    error = state.outcome.exception() if state.outcome else None
    return max(pause, error.retry_after if isinstance(error, _TransientError) else 0.0)


def _from_environment(name: str, value: str) -> str:
    if not value.startswith("$"):
        return value
    if value[1:] not in os.environ:
        raise UserError(
            f"header {name}: the environment variable {value[1:]} is not set. Set it before the job starts."
        )
    return os.environ[value[1:]]


def _keep_alive() -> list[tuple[int, int, int]]:
    options = [
        (socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in KEEP_ALIVE if hasattr(socket, name)
    ]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *options]


def _error_message(content: Any) -> str:
    """Returns the message of an error of SGLang or FastAPI."""
    if not isinstance(content, dict):
        return str(content)
    inner = content.get("error", content.get("message", content.get("detail", content)))
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
