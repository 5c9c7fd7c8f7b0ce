"""Protocol `/v1/responses` of OpenAI.

Responses are stored for `previous_response_id` and references to items while their session runs, unless `store` is
false. Sampling parameters, `reasoning`, `text` (its format too), `truncation`, `max_tool_calls`, `parallel_tool_calls`
and a `tool_choice` that forces a call are accepted and ignored: the policy samples freely.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_mg.agents.call import Call, Reply, RequestError
from verl_mg.agents.protocols import exchange, response_events
from verl_mg.agents.protocols.exchange import Exchange, JsonObject, Protocol
from verl_mg.agents.protocols.fields import (
    Count,
    Fields,
    is_tool_choice,
    quoted,
    read,
    refusal,
    refuse_unless,
    with_one_system,
)
from verl_mg.agents.protocols.memory import SessionMemory, StoredResponse
from verl_mg.agents.protocols.response_items import items_of, messages_of
from verl_mg.agents.protocols.response_tools import OfferedTool, offered_tools

LOGPROBS = "message.output_text.logprobs"


class _Request(Fields):
    model: str
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None


class Responses(Protocol):
    """The protocol `/v1/responses`."""

    def read(self, body: Any, memory: SessionMemory) -> Exchange:
        """Reads the body of a request; see `Protocol.read`."""
        request = read(_Request, body)
        _refuse_unsupported(request)
        earlier = _earlier(request, memory)
        new = messages_of(request.input, memory)
        if not earlier + new:
            raise refusal("input", "empty", "Send text or items")
        # Instructions hold for one response: `earlier` has none, so that a continued one may replace them.
        instructions = () if request.instructions is None else ({"role": "system", "content": request.instructions},)
        tools = tuple(offered_tools(request.tools or []))
        return ResponseExchange(
            call=Call(
                messages=with_one_system(instructions + earlier + new),
                tools=tuple(tool.schema for tool in tools if request.tool_choice != "none"),
                model=request.model,
                max_tokens=request.max_output_tokens,
                images=memory.images,
            ),
            stream=bool(request.stream),
            id=f"resp_{uuid.uuid4().hex}",
            created=int(time.time()),
            request=request,
            earlier=earlier,
            new=new,
            tools={tool.schema["function"]["name"]: tool for tool in tools},
            memory=memory,
        )

    def error(self, error: RequestError) -> JsonObject:
        """Returns the body of a reply that reports an error."""
        return exchange.openai_error(error)


def _refuse_unsupported(request: _Request) -> None:
    refuse_unless(
        not request.top_logprobs,
        "top_logprobs",
        request.top_logprobs,
        "Use 0: only the log-probabilities of the generated tokens are known",
    )
    refuse_unless(is_tool_choice(request.tool_choice), "tool_choice", request.tool_choice, 'Use "auto" or "none"')
    refuse_unless(not request.background, "background", request.background, "Wait for the reply")
    refuse_unless(request.conversation is None, "conversation", request.conversation, "Use previous_response_id")
    refuse_unless(request.prompt is None, "prompt", request.prompt, "Send the text of the prompt as input")
    if not isinstance(request.input, str | list):
        raise refusal("input", "neither text nor a list of items", "Send text or items")


def _earlier(request: _Request, memory: SessionMemory) -> tuple[JsonObject, ...]:
    name = request.previous_response_id
    if name is None:
        return ()
    stored = memory.response(name)
    if stored is None:
        wrong = f"{quoted(name)} is not stored in this session"
        raise refusal("previous_response_id", wrong, "Send the whole input", "previous_response_not_found")
    return stored.messages


@dataclass(frozen=True)
class ResponseExchange(Exchange):
    """A request for a response."""

    id: str
    created: int  # time of the request, seconds since 1970
    request: _Request  # fields of the request, which the response repeats
    earlier: tuple[JsonObject, ...]  # messages of the stored response that this one continues
    new: tuple[JsonObject, ...]  # messages of the input
    tools: dict[str, OfferedTool]  # tools by the name that the policy knows
    memory: SessionMemory  # stores the response

    def body(self, reply: Reply) -> JsonObject:
        """Returns the reply as a response, and stores it."""
        logprobs = exchange.logprobs(reply.tokens) if LOGPROBS in (self.request.include or ()) else []
        items = list(items_of(reply, self.tools, logprobs, self.memory))
        if self.request.store is not False:
            # The size is of the added messages only, since `earlier` is shared with the response before.
            added = (*self.new, reply.message)
            by_id = {item["id"]: item for item in items}
            stored = StoredResponse((*self.earlier, *added), by_id, sum(len(str(message)) for message in added))
            self.memory.store(self.id, stored)
        incomplete = reply.finish == "length"
        return self._response() | {
            "status": "incomplete" if incomplete else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "output": items,
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": len(reply.tokens),
                "output_tokens_details": {"reasoning_tokens": exchange.reasoning_tokens(reply)},
                "total_tokens": reply.prompt_tokens + len(reply.tokens),
            },
        }

    def _response(self) -> JsonObject:
        request = self.request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": request.reasoning,
            "store": request.store is not False,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "truncation": "disabled",  # a conversation that is too long is refused, never shortened
            "usage": None,
        }

    def events(self, body: JsonObject, earlier: int = 0) -> Iterator[bytes]:
        """Returns the events of a response; see `Exchange.events`."""
        return response_events.numbered(self._events(body, begun=earlier > 0), earlier + 1 if earlier else 0)

    def _events(self, body: JsonObject, begun: bool) -> Iterator[response_events.Event]:
        if not begun:
            yield from response_events.begin(self._response())
        for index, item in enumerate(body["output"]):
            yield from response_events.of_item(item, index)
        yield body["status"], {"response": body}

    def keep_alive(self, earlier: int) -> bytes:
        """Returns the first two events, then the second one again. See `Exchange.keep_alive`."""
        # Clients count events, so each one gets the next sequence number.
        events = list(response_events.begin(self._response()))
        if earlier == 0:
            return b"".join(response_events.numbered(iter(events), 0))
        return b"".join(response_events.numbered(iter(events[1:]), earlier + 1))

    def error_event(self, error: RequestError, earlier: int) -> bytes:
        """Returns the event of a failed response; see `Exchange.error_event`."""
        reason = {"code": error.code or "server_error", "message": error.message}
        failed = self._response() | {"status": "failed", "error": reason}
        return b"".join(response_events.numbered(iter([("failed", {"response": failed})]), earlier + 1))
