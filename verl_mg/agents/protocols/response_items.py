"""Items of OpenAI's responses: items of a request become messages, and a reply becomes items.

    {"role": "assistant", "reasoning_content": R, "content": T, "tool_calls": [C, D]}
        <--> items  reasoning R, message T, function_call C, function_call D

In this order; when they come back they are one message again. The text of the reasoning is also in `encrypted_content`,
in Base64, because clients without stored responses send only this back.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from verl_mg.agents.call import Reply
from verl_mg.agents.protocols.exchange import JsonObject
from verl_mg.agents.protocols.fields import LINES, PIECES, Fields, Name, quoted, read, refusal, text_of
from verl_mg.agents.protocols.images import content_of
from verl_mg.agents.protocols.memory import SessionMemory
from verl_mg.agents.protocols.response_tools import OfferedTool, read_call, written_call

PARTS = ("reasoning_content", "content", "tool_calls")  # parts of an assistant's message in the order of their items
ROLES = {"user": "user", "system": "system", "developer": "system"}


class _Message(Fields):
    role: str
    content: Any


class _Reasoning(Fields):
    content: Any = None
    summary: Any = None
    encrypted_content: str | None = None


class _Output(Fields):
    call_id: Name
    output: Any


class _Reference(Fields):
    id: Name


def messages_of(items: str | list[Any], memory: SessionMemory) -> tuple[JsonObject, ...]:
    """Reads the input of a request, text of a user or items; `memory` has the items that it refers to."""
    if isinstance(items, str):
        return ({"role": "user", "content": items},)
    messages: list[JsonObject] = []
    for number, item in enumerate(items):
        message = _read(item, f"input[{number}]", memory)
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
    names = [PARTS.index(name) for name in PARTS if name in message]
    (new,) = [PARTS.index(name) for name in PARTS if name in part] or [-1]
    return (
        message["role"] == part["role"] == "assistant"
        and new >= 0
        and (new > max(names) or new == max(names) == PARTS.index("tool_calls"))
    )


def _read(item: Any, field: str, memory: SessionMemory) -> JsonObject:
    """Returns an item as a message; an assistant's message has one part."""
    if not isinstance(item, dict):
        raise refusal(field, "not an object", "Send items of a response")
    # The type of a message and of a reference may be left out in OpenAI's API.
    match item.get("type") or ("message" if "role" in item else "item_reference"):
        case "message":
            return _read_message(read(_Message, item, field), field, memory)
        case "reasoning":
            text = _reasoning(read(_Reasoning, item, field), field)
            return {"role": "assistant", "reasoning_content": text} if text else {"role": "assistant"}
        case "function_call" | "custom_tool_call":
            return {"role": "assistant", "tool_calls": [read_call(item, field, memory)]}
        case "function_call_output" | "custom_tool_call_output":
            output = read(_Output, item, field)
            content = content_of(output.output, f"{field}.output", LINES, memory)
            return {"role": "tool", "content": content, "tool_call_id": output.call_id}
        case "item_reference":
            name = read(_Reference, item, field).id
            stored = memory.item(name)
            if stored is None:
                raise refusal(f"{field}.id", f"{quoted(name)} is not stored", "Send the item itself")
            return _read(stored, field, memory)
        case kind:
            raise refusal(f"{field}.type", f"{quoted(kind)} is not supported", "The policy reads text and tool calls")


def _read_message(message: _Message, field: str, memory: SessionMemory) -> JsonObject:
    if message.content is None:
        raise refusal(f"{field}.content", "missing", "Add the field to the request")
    if message.role == "assistant":
        return {"role": "assistant", "content": text_of(message.content, f"{field}.content", PIECES)}
    if message.role not in ROLES:
        raise refusal(f"{field}.role", f"{quoted(message.role)} is not a role", "Use user, assistant or system")
    if ROLES[message.role] == "system":
        return {"role": "system", "content": text_of(message.content, f"{field}.content", LINES)}
    return {"role": "user", "content": content_of(message.content, f"{field}.content", LINES, memory)}


def _reasoning(item: _Reasoning, field: str) -> str:
    if text := text_of(item.content, f"{field}.content", PIECES):
        return text
    if not item.encrypted_content:
        return text_of(item.summary, f"{field}.summary", LINES)
    try:
        return base64.b64decode(item.encrypted_content, validate=True).decode()
    except (binascii.Error, ValueError):
        fix = "Send it as you have got it from this endpoint, or remove the item"
        raise refusal(f"{field}.encrypted_content", "cannot be read", fix) from None


def items_of(
    reply: Reply, tools: Mapping[str, OfferedTool], logprobs: list[JsonObject], memory: SessionMemory
) -> Iterator[JsonObject]:
    """Yields the items of a reply; `tools` by the name that the policy knows, `logprobs` of the reply's tokens."""
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
        text = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": logprobs}
        status = "incomplete" if reply.finish == "length" else "completed"
        yield {"type": "message", "id": _id("msg"), "role": "assistant", "status": status, "content": [text]}
    for call in reply.tool_calls:
        item = written_call(call, tools.get(call.name), memory)
        yield item | {"id": _id("ctc" if item["type"] == "custom_tool_call" else "fc")}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
