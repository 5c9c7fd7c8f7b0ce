"""A backend whose replies a test determines."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from verl_mg.agents.call import Call, Reply, ReplyToken, RequestError
from verl_mg.agents.server import AgentServer
from verl_mg.agents.tool_calls import ToolCall

SESSION, KEY = "sample-7", "key-of-sample-7"


def reply_of(text: str = "", reasoning: str = "", calls: tuple[ToolCall, ...] = (), finish: str = "") -> Reply:
    """A reply whose tokens are characters, with the reasoning between delimiters."""
    written = (f"<think>{reasoning}</think>" if reasoning else "") + text + "".join(call.arguments for call in calls)
    tokens = tuple(ReplyToken(ord(character), character, -0.5) for character in written)
    return Reply(text, reasoning, calls, finish or ("tool_calls" if calls else "stop"), tokens, 11, 3)


def answer(call: Call) -> Reply:
    """Calls the first tool once, where there are tools; else replies with text."""
    if call.tools and call.messages[-1]["role"] == "user":
        name = call.tools[0]["function"]["name"]
        return reply_of(
            reasoning="It needs the tool.", calls=(ToolCall("call_1", name, '{"city": "Bern", "days": 2}'),)
        )
    return reply_of(text=f"Reply to {len(call.messages)} messages.", reasoning="I know it.")


class ScriptedBackend:
    """Replies with a function of the call, and keeps the calls."""

    def __init__(self, reply: Callable[[Call], Reply] = answer, delay: float = 0.0) -> None:
        self.reply, self.delay = reply, delay
        self.calls: list[Call] = []
        self.replies: list[Reply] = []
        self.authorized = 0
        self.ends_after = 10**9

    def authorize(self, session: str, key: str) -> None:
        self.authorized += 1
        if session != SESSION or self.authorized > self.ends_after:
            raise RequestError(404, "session: unknown. Use the URL of a running sample.")
        if key != KEY:
            raise RequestError(401, "key: wrong. Send the key of the session.", code="invalid_api_key")

    async def complete(self, session: str, call: Call) -> Reply:
        self.calls.append(call)
        await asyncio.sleep(self.delay)
        reply = replace(self.reply(call), prompt_tokens=5 + 10 * len(call.messages))
        self.replies.append(reply)
        return reply

    async def count_tokens(self, session: str, call: Call) -> int:
        self.calls.append(call)
        return sum(len(message["content"]) for message in call.messages)


@contextmanager
def serving(backend: ScriptedBackend, **options: object) -> Iterator[AgentServer]:
    """A running server."""
    given: Any = {"host": "127.0.0.1", "on_error": print} | options
    server = AgentServer(backend, **given)
    try:
        yield server
    finally:
        server.close()


def base_url(server: AgentServer) -> str:
    """The URL of the session for OpenAI's client."""
    return f"{server.url}/sessions/{SESSION}/v1"
