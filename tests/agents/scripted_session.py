"""A session and a sample without an engine: an agent's endpoint whose replies are scripted."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.agents.scripted_backend import KEY, ScriptedBackend, base_url, reply_of, serving
from verl_mg.agents.call import Call, Reply
from verl_mg.agents.tool_calls import ToolCall

Message = dict[str, Any]
Agent = Callable[[Any, Any], Coroutine[Any, Any, Any]]


@dataclass
class ScriptedSession:
    """What an agent is given."""

    base_url: str
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=lambda: [{"role": "user", "content": "1+1="}])
    api_key: str = KEY
    model: str = "policy"
    written: list[str] = field(default_factory=list)

    @property
    def anthropic_base_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    def log(self, text: str) -> None:
        self.written.append(text)


@dataclass
class ScriptedSample:
    """The prompt and its record."""

    prompt: str = "1+1="
    answer: str | None = "2"
    record: dict[str, Any] = field(default_factory=lambda: {"prompt": "1+1=", "answer": "2"})


@contextmanager
def policy(reply: Callable[[dict[str, Any]], str | Message]) -> Iterator[str]:
    """Serves the endpoint and yields its base URL; `reply` makes a message, or its text, from the request."""

    def answer(call: Call) -> Reply:
        fields = {"messages": list(call.messages), "tools": list(call.tools)}
        message = reply({**fields, "model": call.model, "max_tokens": call.max_tokens})
        if isinstance(message, str):
            return reply_of(message)
        called = [(item["id"], item["function"]) for item in message["tool_calls"]]
        return reply_of(calls=tuple(ToolCall(name, call["name"], call["arguments"]) for name, call in called))

    with serving(ScriptedBackend(answer)) as server:
        yield base_url(server)


def episode(
    agent: Agent, url: str, record: dict[str, Any], reply: Callable[[dict[str, Any]], str | Message], **options: Any
) -> Any:
    """What an agent returns that plays with a scripted policy on a server of environments."""
    with policy(reply) as address:
        session = ScriptedSession(address, {"url": url, **options})
        return asyncio.run(agent(session, ScriptedSample(record=record)))
