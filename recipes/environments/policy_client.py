"""Client of the policy's endpoint, for agents that are loops of this package."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from verl_mg.agents.agent import AgentError, Session

Message = dict[str, Any]
TOO_LONG = "context_length_exceeded"


class PolicyClient:
    """A conversation with the policy of one sample, which begins with the prompt; `max_tokens` limits each reply."""

    def __init__(self, client: httpx.AsyncClient, session: Session, max_tokens: int | None) -> None:
        self._client, self._model, self._max_tokens = client, session.model, max_tokens
        self.messages: list[Message] = [dict(message) for message in session.messages]

    def add_observation(self, text: str) -> None:
        """Adds text of the environment: to the last message if that is the user's, since templates require turns."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "user" and isinstance(last["content"], list):  # with images
            last["content"] = [*last["content"], {"type": "text", "text": text}]
        elif last.get("role") == "user":
            last["content"] = "\n\n".join(filter(None, (last["content"], text)))
        else:
            self.messages.append({"role": "user", "content": text})

    def add_result(self, call: Message, text: str) -> None:
        """Adds the result of a call, which is an entry of the reply's `tool_calls`."""
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    async def reply(self, tools: Sequence[Message] = ()) -> Message | None:
        """Returns the policy's next message and adds it; None where the sample has no tokens left."""
        body: dict[str, Any] = {"model": self._model, "messages": self.messages}
        if tools:
            body["tools"] = list(tools)
        if self._max_tokens is not None:
            body["max_tokens"] = self._max_tokens
        try:
            response = await self._client.post("chat/completions", json=body)
        except httpx.HTTPError as error:
            raise AgentError(f"the policy's endpoint: {type(error).__name__}: {error}") from error
        if response.is_error:
            if TOO_LONG in response.text:
                return None
            raise AgentError(f"the policy's endpoint: status {response.status_code}: {response.text[:500]}")
        message: Message = response.json()["choices"][0]["message"]
        message = {name: value for name, value in message.items() if value is not None}
        self.messages.append(message)
        return message


@asynccontextmanager
async def policy_of(session: Session, max_tokens: int | None = None) -> AsyncIterator[PolicyClient]:
    """Opens a client of the policy."""
    headers = {"Authorization": f"Bearer {session.api_key}"}
    url = session.base_url.rstrip("/") + "/"
    # A client for https reads the certificates of the system, which takes longer than many a reply.
    secure = url.startswith("https")
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, trust_env=False, verify=secure) as client:
        yield PolicyClient(client, session, max_tokens)
