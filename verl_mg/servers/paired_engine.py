"""Pair of SGLang servers, one for prefill and one for decoding, as one rollout engine.

A pair is named PREFILL+DECODE, such as http://node7:30000+http://node8:30000. Both get each request, with the place at
which the decode server fetches keys and values of the prompt; the decode server's response is returned. SGLang's own
router for such servers (`mini_lb` of sglang-router) sends the same, but passes no updates of weights on, which have to
reach both.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from verl_mg.errors import UserError
from verl_mg.servers.info import Role, ServerKeys, ServerRequirements, probe_server
from verl_mg.servers.remote_engine import RemoteEngine

# Values of SGLang's `--disaggregation-mode` of the servers of a pair, in the order of their addresses.
ROLES: tuple[Role, ...] = ("prefill", "decode")


def parts_of(url: str) -> list[str]:
    """Returns the addresses of an entry of `rollout.urls`: one, or a pair for prefill and decoding."""
    return [part.rstrip("/") for part in re.split(r"\+(?=https?://)", url)]


def check_addresses(urls: Iterable[str]) -> None:
    """Checks that entries name each server once, and one server or a pair; UserError where they do not."""
    parts = []
    for url in urls:
        parts += parts_of(url)
        if len(parts_of(url)) > len(ROLES):
            raise UserError(f"rollout.urls: {url} has more than two parts. Write PREFILL_URL+DECODE_URL for a pair.")
    if twice := [part for part in parts if parts.count(part) > 1]:
        raise UserError(f"rollout.urls: the server {twice[0]} is named twice. Name each once.")


def probe_entry(url: str, requirements: ServerRequirements, keys: ServerKeys) -> list[str]:
    """Queries and checks the servers of an entry of `rollout.urls`, and returns the parallel sizes of each."""
    parts = parts_of(url)
    roles: tuple[Role, ...] = ROLES if len(parts) > 1 else ("null",)
    return [
        probe_server(part, replace(requirements, role=role), keys).layout
        for part, role in zip(parts, roles, strict=True)
    ]


def connect_engine(url: str, *arguments: Any, **keywords: Any) -> RemoteEngine:
    """Returns the client of an entry of `rollout.urls`, with the arguments of `RemoteEngine`."""
    return (PairedEngine if len(parts_of(url)) > 1 else RemoteEngine)(url, *arguments, **keywords)


class PairedEngine(RemoteEngine):
    """Client of a decode server, and of the prefill server that it fetches keys and values from."""

    def __init__(self, url: str, requirements: ServerRequirements, *arguments: Any, **keywords: Any) -> None:
        prefill, decode = parts_of(url)
        self._prefill = RemoteEngine(prefill, replace(requirements, role="prefill"), *arguments, **keywords)
        # The client of the decode server tracks the requests; the other one only sends.
        try:
            super().__init__(decode, replace(requirements, role="decode"), *arguments, **keywords)
        except UserError:
            self._prefill.close()
            raise

    @property
    def parts(self) -> tuple[RemoteEngine, ...]:
        """Clients of both servers, each of which receives weights."""
        return self, self._prefill

    def health(self) -> bool:
        """Returns whether the weights have been sent to both servers."""
        return self._prefill.health() and super().health()

    def close(self) -> None:
        """Disconnects from both servers, which keep running."""
        super().close()
        self._prefill.close()

    def bootstrap_fields(self) -> dict[str, Any]:
        """Returns the fields by which a request's parts on both servers find each other."""
        host = urlsplit(self._prefill.url).hostname or ""
        return {
            "bootstrap_host": f"[{host}]" if ":" in host else host,
            "bootstrap_port": self._prefill.info.bootstrap_port,
            "bootstrap_room": random.getrandbits(63),  # a number that no other request has
        }

    async def _exchange(self, body: dict[str, Any]) -> dict[str, Any]:
        body = body | self.bootstrap_fields()
        first = asyncio.wrap_future(self._prefill.start_exchange(body))
        second = asyncio.ensure_future(super()._exchange(body))
        try:
            filled, response = await asyncio.gather(first, second)
        finally:
            for sent in (first, second):
                sent.cancel()  # a server waits for the other one
        # The cache with earlier turns is that of the prefill server.
        response["meta_info"]["cached_tokens"] = filled["meta_info"].get("cached_tokens", 0)
        return response

    async def _send_abort(self, rid: str) -> None:
        await asyncio.wrap_future(self._prefill.start_abort(rid))
        await super()._send_abort(rid)
