"""The API `/v1/responses` of OpenAI.

Responses are stored for `previous_response_id` and references to items while their session runs, unless `store` is
false. Sampling parameters, `reasoning`, `text` (its format too), `truncation`, `max_tool_calls`, `parallel_tool_calls`
and a `tool_choice` that forces a call are accepted and ignored: the policy samples freely.

Items of a request become messages, and a reply becomes items; when they come back they are one message again:

    {"role": "assistant", "reasoning_content": R, "content": T, "tool_calls": [C, D]}
        <--> items  reasoning R, message T, function_call C, function_call D

The text of the reasoning is also in `encrypted_content`, in Base64, because clients without stored responses send only
this back. A tool of type `custom` takes free text; the policy sees it as a function with the argument `input`. Tools in
a namespace, as Codex sends tools of MCP servers, have its name in front of theirs.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from verl_mg.agents.call import Call, Reply, RequestError, assistant_message
from verl_mg.agents.protocols import ChatApi, Exchange, JsonObject, fields, logprobs, reasoning_tokens, sse
from verl_mg.agents.protocols.memory import SessionMemory, StoredResponse, content_of, message_of
from verl_mg.agents.tool_calls import ToolCall

LOGPROBS = "message.output_text.logprobs"
UNSUPPORTED: fields.Supported = {
    **fields.TOP_LOGPROBS,
    "background": (fields.NOTHING, "Wait for the reply"),
    "conversation": ((), "Use previous_response_id"),
    "prompt": ((), "Send the text of the prompt as input"),
}
# Tools that the provider runs and Codex offers by default: they are not offered to the policy. Others are refused.
NOT_OFFERED = ("web_search", "web_search_preview", "image_generation", "tool_search")
INPUT = "input"
CUSTOM_PARAMETERS = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
PARTS = ("reasoning_content", "content", "tool_calls")  # parts of an assistant's message in the order of their items
# Fields of an item before its text, in the events of a stream.
BEGUN: dict[str, JsonObject] = {
    "message": {"content": [], "status": "in_progress"},
    "reasoning": {"content": [], "encrypted_content": None},
    "function_call": {"arguments": "", "status": "in_progress"},
    "custom_tool_call": {"input": ""},
}
Event = tuple[str, JsonObject]  # type of an event after "response.", and its fields


class _Request(fields.Fields):
    model: str
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    max_output_tokens: fields.Count | None = None
    stream: bool | None = None
    include: list[str] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None


class _Grammar(fields.Fields):
    type: str = "text"
    syntax: str | None = None
    definition: str | None = None


class _Custom(fields.Fields):
    name: fields.Name
    description: str | None = None
    format: _Grammar | None = None


class _Namespace(fields.Fields):
    name: fields.Name
    tools: list[Any]


class _Call(fields.Fields):
    call_id: fields.Name
    name: fields.Name
    namespace: str | None = None


class _Reasoning(fields.Fields):
    content: Any = None
    summary: Any = None
    encrypted_content: str | None = None


class _Output(fields.Fields):
    call_id: fields.Name
    output: Any


@dataclass(frozen=True)
class OfferedTool:
    """A tool that the policy may call."""

    schema: JsonObject  # the tool as one of `Call.tools`
    name: str  # its name in the agent
    namespace: str | None  # its namespace in the agent
    takes_text: bool  # whether it takes free text instead of arguments


class Responses(ChatApi):
    """The API `/v1/responses` of OpenAI."""

    def read(self, body: Any, memory: SessionMemory) -> Exchange:
        request = fields.read(_Request, body)
        fields.refuse_others(body, UNSUPPORTED)
        offered = fields.offers_tools(request.tool_choice)
        earlier = _earlier(request.previous_response_id, memory)
        new = _messages(request.input, memory)
        if not earlier + new:
            raise fields.refusal("input", "empty", "Send text or items")
        # Instructions hold for one response: `earlier` has none, so that a continued one may replace them.
        instructions = () if request.instructions is None else ({"role": "system", "content": request.instructions},)
        tools = tuple(_offered_tools(request.tools or []))
        return ResponseExchange(
            call=Call(
                messages=fields.with_one_system(instructions + earlier + new),
                tools=tuple(tool.schema for tool in tools if offered),
                model=request.model,
                max_tokens=request.max_output_tokens,
                images=memory.images,
            ),
            stream=bool(request.stream),
            memory=memory,
            id=f"resp_{uuid.uuid4().hex}",
            created=int(time.time()),
            request=request,
            earlier=earlier,
            new=new,
            tools={tool.schema["function"]["name"]: tool for tool in tools},
        )


def _earlier(name: str | None, memory: SessionMemory) -> tuple[JsonObject, ...]:
    if name is None:
        return ()
    stored = memory.response(name)
    if stored is None:
        wrong = f"{fields.quoted(name)} is not stored in this session"
        raise fields.refusal("previous_response_id", wrong, "Send the whole input", "previous_response_not_found")
    return stored.messages


def _messages(items: Any, memory: SessionMemory) -> tuple[JsonObject, ...]:
    """Reads the input of a request, text of a user or items; `memory` has the items that it refers to."""
    if isinstance(items, str):
        return ({"role": "user", "content": items},)
    if not isinstance(items, list):
        raise fields.refusal("input", "neither text nor a list of items", "Send text or items")
    messages: list[JsonObject] = []
    for number, item in enumerate(items):
        message = _read_item(item, f"input[{number}]", memory)
        if messages and _continues(messages[-1], message):
            part = next(part for part in PARTS if part in message)
            messages[-1][part] = messages[-1].get(part, []) + message[part] if part == "tool_calls" else message[part]
        elif len(message) > 1:  # not only a role, as reasoning without a text
            messages.append(message)
    for message in messages:
        message.setdefault("content", "")
    return tuple(messages)


def _continues(message: JsonObject, part: JsonObject) -> bool:
    """Returns whether a part belongs to the same message of the assistant: nothing that it has comes after the part."""
    last = max((PARTS.index(name) for name in PARTS if name in message), default=-1)
    (new,) = [PARTS.index(name) for name in PARTS if name in part] or [-1]
    follows = new > last or new == last == PARTS.index("tool_calls")
    return message["role"] == part["role"] == "assistant" and new >= 0 and follows


def _read_item(item: Any, field: str, memory: SessionMemory) -> JsonObject:
    """Returns an item as a message; an assistant's message has one part."""
    if not isinstance(item, dict):
        raise fields.refusal(field, "not an object", "Send items of a response")
    # The type of a message and of a reference may be left out in OpenAI's API.
    match item.get("type") or ("message" if "role" in item else "item_reference"):
        case "message":
            return _read_message(fields.text_at(item, field, "role"), item.get("content"), field, memory)
        case "reasoning":
            text = _reasoning(fields.read(_Reasoning, item, field), field)
            return {"role": "assistant", "reasoning_content": text} if text else {"role": "assistant"}
        case "function_call" | "custom_tool_call":
            return {"role": "assistant", "tool_calls": [_read_call(item, field, memory).entry]}
        case "function_call_output" | "custom_tool_call_output":
            output = fields.read(_Output, item, field)
            content = content_of(output.output, f"{field}.output", fields.LINES, memory)
            return {"role": "tool", "content": content, "tool_call_id": output.call_id}
        case "item_reference":
            name = fields.text_at(item, field, "id")
            stored = memory.item(name)
            if stored is None:
                raise fields.refusal(f"{field}.id", f"{fields.quoted(name)} is not stored", "Send the item itself")
            return _read_item(stored, field, memory)
        case kind:
            raise fields.unsupported(f"{field}.type", kind, "The policy reads text and tool calls")


def _read_message(role: str, content: Any, field: str, memory: SessionMemory) -> JsonObject:
    place = f"{field}.content"
    if role == "assistant":
        if content is None:
            raise fields.missing(place)
        return assistant_message(fields.text_of(content, place, fields.PIECES), "", ())
    if role not in ("user", "system", "developer"):
        raise fields.refusal(f"{field}.role", f"{fields.quoted(role)} is not a role", "Use user, assistant or system")
    return message_of(role, content, place, memory)


def _reasoning(item: _Reasoning, field: str) -> str:
    if text := fields.text_of(item.content, f"{field}.content", fields.PIECES):
        return text
    if not item.encrypted_content:
        return fields.text_of(item.summary, f"{field}.summary", fields.LINES)
    try:
        return base64.b64decode(item.encrypted_content, validate=True).decode()
    except (binascii.Error, ValueError):
        fix = "Send it as you have got it from this endpoint, or remove the item"
        raise fields.refusal(f"{field}.encrypted_content", "cannot be read", fix) from None


def _read_call(item: JsonObject, field: str, memory: SessionMemory) -> ToolCall:
    call = fields.read(_Call, item, field)
    if item["type"] == "function_call":
        arguments = memory.written_arguments(call.call_id, fields.text_at(item, field, "arguments"))
    else:
        # The policy has written free text as the argument of a function, and its tokens stay only for the same text.
        given, written = fields.text_at(item, field, INPUT), memory.arguments(call.call_id)
        is_same = written is not None and _free_text(written) == given
        arguments = written if written is not None and is_same else json.dumps({INPUT: given}, ensure_ascii=False)
    return ToolCall(call.call_id, _full_name(call.namespace, call.name), arguments)


def _free_text(arguments: str) -> str:
    """Returns the free text in a call's arguments, or the arguments where they are malformed."""
    value = fields.json_object(arguments)
    return value[INPUT] if value and set(value) == {INPUT} and isinstance(value[INPUT], str) else arguments


def _full_name(namespace: str | None, name: str) -> str:
    """Returns the name by which the policy knows a tool, such as files__read for read in the namespace files."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def _offered_tools(tools: list[Any], field: str = "tools", namespace: str | None = None) -> Iterator[OfferedTool]:
    """Reads the tools of a request; RequestError for one that is invalid or runs at a provider."""
    for number, tool in enumerate(tools):
        place = f"{field}[{number}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and namespace is None:
            inner = fields.read(_Namespace, tool, place)
            yield from _offered_tools(inner.tools, f"{place}.tools", inner.name)
        elif kind in ("function", "custom"):
            function = _custom(tool, place) if kind == "custom" else fields.read(fields.Function, tool, place)
            schema = function.model_copy(update={"name": _full_name(namespace, function.name)}).tool()
            yield OfferedTool(schema, function.name, namespace, takes_text=kind == "custom")
        elif kind not in NOT_OFFERED:
            raise fields.unsupported(f"{place}.type", kind, "Give the agent a function that does it")


def _custom(item: JsonObject, field: str) -> fields.Function:
    """Reads a tool that takes free text, as a function."""
    tool = fields.read(_Custom, item, field)
    description = tool.description
    if tool.format is not None and tool.format.definition is not None:
        # A grammar does not constrain sampling, so the policy has to read it.
        grammar = f"The input follows this {tool.format.syntax or ''} grammar:\n{tool.format.definition}"
        description = f"{description}\n\n{grammar}" if description else grammar
    return fields.Function(name=tool.name, description=description, parameters=CUSTOM_PARAMETERS)


@dataclass(frozen=True)
class ResponseExchange(Exchange):
    """A request for a response."""

    id: str
    created: int  # time of the request, seconds since 1970
    request: _Request  # fields of the request, which the response repeats
    earlier: tuple[JsonObject, ...]  # messages of the stored response that this one continues
    new: tuple[JsonObject, ...]  # messages of the input
    tools: dict[str, OfferedTool]  # tools by the name that the policy knows

    def written(self, reply: Reply) -> JsonObject:
        """Returns the reply as a response, and stores it."""
        items = list(self._items(reply))
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
                "output_tokens_details": {"reasoning_tokens": reasoning_tokens(reply)},
                "total_tokens": reply.prompt_tokens + len(reply.tokens),
            },
        }

    def _items(self, reply: Reply) -> Iterator[JsonObject]:
        if reply.reasoning:
            yield {
                "type": "reasoning",
                "id": _id("rs"),
                "summary": [],
                "content": [{"type": "reasoning_text", "text": reply.reasoning}],
                "encrypted_content": base64.b64encode(reply.reasoning.encode()).decode(),
            }
        # A response without calls has a message, also an empty one: clients read its text.
        if reply.text or not reply.tool_calls:
            tokens = logprobs(reply.tokens) if LOGPROBS in (self.request.include or ()) else []
            text = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": tokens}
            status = "incomplete" if reply.finish == "length" else "completed"
            yield {"type": "message", "id": _id("msg"), "role": "assistant", "status": status, "content": [text]}
        for call in reply.tool_calls:
            tool = self.tools.get(call.name)  # None for one that was not offered
            named: JsonObject = {"call_id": call.id, "name": tool.name if tool else call.name}
            if tool and tool.namespace:
                named["namespace"] = tool.namespace
            if tool and tool.takes_text:
                yield {"type": "custom_tool_call", "id": _id("ctc"), "input": _free_text(call.arguments)} | named
            else:
                arguments = {"arguments": call.arguments, "status": "completed"}
                yield {"type": "function_call", "id": _id("fc")} | named | arguments

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
        begin = [] if earlier else self._begin()
        items = [event for index, item in enumerate(body["output"]) for event in _item_events(item, index)]
        return _numbered([*begin, *items, (body["status"], {"response": body})], earlier + 1 if earlier else 0)

    def keep_alive(self, earlier: int) -> bytes:
        # The first two events, then the second one again. Clients count events: each gets the next sequence number.
        created, in_progress = self._begin()
        return b"".join(_numbered([in_progress], earlier + 1) if earlier else _numbered([created, in_progress], 0))

    def error_event(self, error: RequestError, earlier: int) -> bytes:
        reason = {"code": error.code or "server_error", "message": error.message}
        failed = self._response() | {"status": "failed", "error": reason}
        return b"".join(_numbered([("failed", {"response": failed})], earlier + 1))

    def _begin(self) -> list[Event]:
        return [(kind, {"response": self._response()}) for kind in ("created", "in_progress")]


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _numbered(events: Iterable[Event], first: int) -> Iterator[bytes]:
    """Yields server-sent events with their sequence numbers, from `first` on."""
    for number, (kind, content) in enumerate(events, first):
        yield sse({"type": f"response.{kind}", "sequence_number": number} | content, f"response.{kind}")


def _item_events(item: JsonObject, index: int) -> Iterator[Event]:
    """Yields the events of the complete item at position `index` of the output; each of its parts has one delta."""
    place = {"output_index": index}
    inside = place | {"item_id": item["id"]}
    yield "output_item.added", place | {"item": item | BEGUN[item["type"]]}
    match item["type"]:
        case "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "function_call_arguments.delta", inside | {"delta": item["arguments"]}
            yield "function_call_arguments.done", inside | done
        case "custom_tool_call":
            yield "custom_tool_call_input.delta", inside | {"delta": item["input"]}
            yield "custom_tool_call_input.done", inside | {"input": item["input"]}
        case _:
            (part,) = item["content"]  # of type output_text or reasoning_text
            inside |= {"content_index": 0}
            tokens = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield "content_part.added", inside | {"part": part | {"text": ""} | {name: [] for name in tokens}}
            yield f"{part['type']}.delta", inside | {"delta": part["text"]} | tokens
            yield f"{part['type']}.done", inside | {"text": part["text"]} | tokens
            yield "content_part.done", inside | {"part": part}
    yield "output_item.done", place | {"item": item}
