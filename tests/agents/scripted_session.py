"""A session and a sample without an engine: an agent's endpoint whose replies a test determines."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from verl_mg.agents.call import Call, Reply, ReplyToken, RequestError
from verl_mg.agents.protocols.memory import SessionMemory
from verl_mg.agents.server import AgentServer
from verl_mg.agents.tool_calls import ToolCall

Message = dict[str, Any]
Agent = Callable[[Any, Any], Coroutine[Any, Any, Any]]
SESSION, KEY = "sample-7", "key-of-sample-7"


def reply_of(text: str = "", reasoning: str = "", calls: tuple[ToolCall, ...] = (), finish: str = "") -> Reply:
    """A reply whose tokens are characters, with the reasoning between delimiters."""
    written = (f"<think>{reasoning}</think>" if reasoning else "") + text + "".join(call.arguments for call in calls)
    tokens = tuple(ReplyToken(ord(character), character, -0.5) for character in written)
    return Reply(text, reasoning, calls, finish or ("tool_calls" if calls else "stop"), tokens, 11, 3)


def answer(call: Call) -> Reply:
    """Calls the first tool once, where there are tools; else replies with text."""
    if call.tools and call.messages[-1]["role"] == "user":
        called = ToolCall("call_1", call.tools[0]["function"]["name"], '{"city": "Bern", "days": 2}')
        return reply_of(reasoning="It needs the tool.", calls=(called,))
    return reply_of(text=f"Reply to {len(call.messages)} messages.", reasoning="I know it.")


class ScriptedBackend:
    """In place of `Sessions`: one session, which replies with a function of the call, and keeps the calls."""

    def __init__(self, reply: Callable[[Call], Reply] = answer, delay: float = 0.0) -> None:
        self.reply, self.delay, self.memory = reply, delay, SessionMemory()
        self.agents: tuple[str, ...] = ()
        self.calls: list[Call] = []
        self.replies: list[Reply] = []

    def authorize(self, session: str, key: str) -> "ScriptedBackend":
        if session != SESSION:
            raise RequestError(404, "session: unknown. Use the URL of a running sample.")
        if key != KEY:
            raise RequestError(401, "key: wrong. Send the key of the session.", code="invalid_api_key")
        return self

    async def complete(self, session: object, call: Call) -> Reply:
        self.calls.append(call)
        await asyncio.sleep(self.delay)
        reply = replace(self.reply(call), prompt_tokens=5 + 10 * len(call.messages))
        self.replies.append(reply)
        return reply

    def count_tokens(self, session: object, call: Call) -> int:
        return sum(len(message["content"]) for message in call.messages)


def serving(backend: Any, on_error: Callable[[BaseException], None] = print) -> AgentServer:
    return AgentServer(backend, "127.0.0.1", on_error)


def base_url(server: AgentServer) -> str:
    """The URL of the session for OpenAI's client."""
    return f"{server.url}/sessions/{SESSION}/v1"


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

    yield base_url(serving(ScriptedBackend(answer)))


def episode(
    agent: Agent, url: str, record: dict[str, Any], reply: Callable[[dict[str, Any]], str | Message], **options: Any
) -> Any:
    """What an agent returns that plays with a scripted policy on a server of environments."""
    with policy(reply) as address:
        session = ScriptedSession(address, {"url": url, **options})
        return asyncio.run(agent(session, ScriptedSample(record=record)))
