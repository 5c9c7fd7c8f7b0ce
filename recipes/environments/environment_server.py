"""Client of servers that play a whole episode in one request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from verl_mg.agents.agent import AgentError
from verl_mg.errors import UserError

CONNECT_SECONDS = 30.0
EXCERPT = 500  # characters of a server's error that are shown


async def post_run(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Posts a request to /run and waits for the object that it returns; the agent's time limit is the only one."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"rollout.agent_options.url: {url!r} is no HTTP address. Write http://HOST:PORT.")
    limits = httpx.Timeout(None, connect=CONNECT_SECONDS)
    try:
        # A client for https reads the certificates of the system, which takes longer than many a reply.
        async with httpx.AsyncClient(timeout=limits, trust_env=False, verify=url.startswith("https")) as client:
            response = await client.post(f"{url.rstrip('/')}/run", json=dict(body))
    except httpx.HTTPError as error:
        raise AgentError(f"{url}/run: {type(error).__name__}: {error}") from error
    try:
        content = response.json()
    except ValueError:
        content = None
    if response.is_error or not isinstance(content, dict):
        raise AgentError(f"{url}/run: status {response.status_code}: {response.text[:EXCERPT]}")
    return content
