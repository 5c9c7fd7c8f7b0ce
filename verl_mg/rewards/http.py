"""JSON to a service that may be slow, busy or away for a moment; used by rewards that live elsewhere."""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from verl_mg.errors import UserError

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the first repetition, doubled each time, and at most."""
LONGEST_RETRY_AFTER = 600.0
"""A service that wants to be left alone for longer is as good as away."""
BUSY, UNAVAILABLE = 429, 503


class JsonService:
    """Posts JSON to one URL, again where it failed in a way that may pass.

    That is: no connection, no answer within `timeout` seconds, a status of 500 or above, or 429. `Retry-After` is
    honoured. `requests_per_second` (0: no limit) holds for this process.
    headers: a value that begins with "$" is that of the environment variable, so that secrets stay out of files.
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
            raise UserError(f"url is {url!r}: write http://HOST:PORT/PATH or https://...")
        if timeout <= 0 or retries < 0 or requests_per_second < 0:
            raise UserError(f"{url}: timeout must be positive, retries and requests_per_second 0 or more")
        self.url = url
        self._timeout, self._retries = timeout, retries
        own = {name: _from_environment(name, value) for name, value in (headers or {}).items()}
        self._headers = {"Content-Type": "application/json"} | own
        self._pace = RateLimiter(requests_per_second) if requests_per_second else None
        self._tls = ssl.create_default_context()

    async def post(self, body: Mapping[str, Any], problem_of: Callable[[Any], str | None] = lambda _: None) -> Any:
        """The JSON that answers `body`.

        problem_of: what is wrong with an answer that asking again may mend; None where nothing is.

        Raises:
            UserError: the service refuses, answers what is not JSON, or has failed once more than `retries` times.
        """
        content = json.dumps(body, allow_nan=False).encode()
        # A client belongs to one event loop, and the next call may come from another.
        async with httpx.AsyncClient(
            verify=self._tls, timeout=self._timeout, headers=self._headers, trust_env=False
        ) as client:
            for attempt in range(self._retries + 1):
                if self._pace:
                    await self._pace.wait()
                pause = min(FIRST_PAUSE * 2**attempt, LONGEST_PAUSE)
                try:
                    response = await asyncio.wait_for(client.post(self.url, content=content), self._timeout)
                except (httpx.RequestError, TimeoutError) as error:
                    problem = str(error) or f"no answer within {self._timeout:g} s"
                else:
                    if response.status_code < 500 and response.status_code != BUSY:
                        answer = self._content(response)
                        found = problem_of(answer)
                        if found is None:
                            return answer
                        problem = found
                    else:
                        problem = f"status {response.status_code}: {response.text[:200]!r}"
                        pause = max(pause, self._asked_to_wait(response))
                if attempt < self._retries:
                    await asyncio.sleep(pause)
        raise UserError(
            f"{self.url}: failed {self._retries + 1} times, at last with {problem}; see to the service, "
            "or raise timeout or retries"
        )

    def _content(self, response: httpx.Response) -> Any:
        if not response.is_success:
            raise UserError(
                f"{self.url}: refused with status {response.status_code}: {response.text[:200]!r}; "
                "correct the URL, the headers or the service"
            )
        try:
            return response.json()
        except (ValueError, RecursionError):
            raise UserError(f"{self.url}: the answer is not JSON: {response.text[:200]!r}; mend the service") from None

    def _asked_to_wait(self, response: httpx.Response) -> float:
        """Seconds, from `Retry-After`: a number of them, or a date."""
        text = response.headers.get("retry-after", "")
        if response.status_code not in (BUSY, UNAVAILABLE) or not text:
            return 0.0
        try:
            date = None if text.isdigit() else email.utils.parsedate_to_datetime(text)
        except ValueError:
            return 0.0
        seconds = float(text) if date is None else date.timestamp() - time.time()
        if seconds > LONGEST_RETRY_AFTER:
            raise UserError(f"{self.url}: asks to be left alone for {seconds:.0f} s; lower requests_per_second")
        return seconds


class RateLimiter:
    """A token bucket: on the average `rate` tokens a second, and no more than a second's worth at once."""

    def __init__(self, rate: float) -> None:
        self._rate, self._capacity = rate, max(1.0, rate)
        self._tokens, self._filled = self._capacity, time.monotonic()

    async def wait(self) -> None:
        """Take a token; those who come when there is none queue up for the ones to come."""
        now = time.monotonic()
        self._tokens = min(self._capacity, self._tokens + (now - self._filled) * self._rate) - 1
        self._filled = now
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / self._rate)


def _from_environment(name: str, value: str) -> str:
    if not value.startswith("$"):
        return value
    if value[1:] not in os.environ:
        raise UserError(f"header {name}: the environment has no variable {value[1:]}; set it before the job starts")
    return os.environ[value[1:]]
