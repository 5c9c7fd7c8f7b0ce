"""The API `/v1/messages` of Anthropic.

Thinking is reasoning in both directions, and its signature is not verified. Sampling parameters, `thinking`,
`cache_control`, `context_management`, formats of the output, a `tool_choice` that forces a call and `is_error` of a
tool's result are accepted and ignored: the policy samples freely.

Arguments of a tool call are an object in this API. Text that is not a JSON object is written as
`{"malformed_arguments": text}`, which an agent refuses as it refuses any wrong arguments, and is read back as the text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from verl_mg.agents.call import Call, Reply, RequestError, assistant_message
from verl_mg.agents.protocols import ChatApi, Exchange, JsonObject, fields, sse
from verl_mg.agents.protocols.memory import Content, SessionMemory, content_of, image_part
from verl_mg.agents.tool_calls import ToolCall

MALFORMED = "malformed_arguments"
SIGNATURE = "unsigned"  # signature of a thinking block, which clients send back
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class _Message(fields.Fields):
    role: Literal["user", "assistant", "system"]
    content: Any


class _Tool(fields.Fields):
    name: fields.Name
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _ToolChoice(fields.Fields):
    type: Literal["auto", "any", "tool", "none"]


class _Context(fields.Fields):
    model: str
    messages: Annotated[list[_Message], Field(min_length=1)]
    system: Any = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None


class _Request(_Context):
    # Required by this API, in which a request to count tokens does not have it.
    max_tokens: fields.Count
    stop_sequences: list[fields.Name] | None = None
    stream: bool | None = None


UNSUPPORTED: fields.Supported = {
    "mcp_servers": (fields.NOTHING, "Give the tools to the agent"),
    "container": ((), "Give the tools to the agent"),
}


class _ToolUse(fields.Fields):
    id: fields.Name
    name: fields.Name
    input: dict[str, Any]


class _ToolResult(fields.Fields):
    tool_use_id: fields.Name
    content: Any = None


class Messages(ChatApi):
    """The API `/v1/messages` of Anthropic."""

    def read(self, body: Any, memory: SessionMemory) -> Exchange:
        request = fields.read(_Request, body)
        context = self.read_context(body, memory)
        call = replace(context, max_tokens=request.max_tokens, stop=tuple(request.stop_sequences or ()))
        return MessagesExchange(call, bool(request.stream), memory)

    def read_context(self, body: Any, memory: SessionMemory) -> Call:
        """Reads the body of a request to count tokens; see `ChatApi.read`."""
        request = fields.read(_Context, body)
        fields.refuse_others(body, UNSUPPORTED)
        text = fields.text_of(request.system or None, "system", fields.LINES)
        system = [{"role": "system", "content": text}] if request.system else []
        messages = (
            part
            for number, message in enumerate(request.messages)
            for part in _messages(message, f"messages[{number}].content", memory)
        )
        tools = tuple(_tool(tool, f"tools[{number}]") for number, tool in enumerate(request.tools or ()))
        offered = request.tool_choice is None or request.tool_choice.type != "none"
        return Call(
            fields.with_one_system((*system, *messages)), tools if offered else (), request.model, images=memory.images
        )

    def error(self, error: RequestError) -> JsonObject:
        """Returns the body of an error, as Anthropic's API writes it."""
        # Claude Code compacts its conversation after an error with this beginning.
        start = "prompt is too long: " if error.code == "context_length_exceeded" else ""
        kind = ERROR_TYPES.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": start + error.message}}


def _tool(tool: _Tool, field: str) -> JsonObject:
    if tool.type not in (None, "custom"):
        raise fields.unsupported(f"{field}.type", tool.type, "Describe the tool with its name and input_schema")
    return fields.Function(name=tool.name, description=tool.description, parameters=tool.input_schema).tool()


def _messages(message: _Message, field: str, memory: SessionMemory) -> Iterator[JsonObject]:
    if message.content is None:
        raise fields.missing(field)
    blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    if not isinstance(blocks, list):
        raise fields.refusal(field, "neither text nor a list of blocks", "Send text")
    named = [(block, f"{field}[{number}]") for number, block in enumerate(blocks)]
    if message.role == "assistant":
        yield _assistant(named, memory)
    else:
        yield from _others(message.role, named, memory)


def _kind(block: Any, field: str) -> Any:
    if not isinstance(block, dict):
        raise fields.refusal(field, "not an object", 'Send blocks as {"type": "text", "text": ...}')
    return block.get("type")


def _unsupported(kind: Any, field: str, supported: str) -> RequestError:
    return fields.unsupported(f"{field}.type", kind, f"The policy reads text: send {supported}")


def _assistant(blocks: list[tuple[Any, str]], memory: SessionMemory) -> JsonObject:
    texts, thoughts, calls = [], [], []
    for block, field in blocks:
        match _kind(block, field):
            case "text":
                texts.append(fields.text_at(block, field, "text"))
            case "thinking":
                thoughts.append(fields.text_at(block, field, "thinking"))
            case "tool_use":
                use = fields.read(_ToolUse, block, field)
                calls.append(ToolCall(use.id, use.name, _arguments(use, memory)))
            case kind:
                raise _unsupported(kind, field, "blocks of type text, thinking or tool_use")
    return assistant_message(fields.PIECES.join(texts), fields.PIECES.join(thoughts), calls)


def _others(role: str, blocks: list[tuple[Any, str]], memory: SessionMemory) -> Iterator[JsonObject]:
    """Yields the messages of a user's or the system's blocks: one for each result of a tool, and for blocks between."""
    parts: list[JsonObject] = []
    for block, field in blocks:
        match _kind(block, field):
            case "text":
                parts.append({"type": "text", "text": fields.text_at(block, field, "text")})
            case "image" if role == "user" and memory.image_limits:
                parts.append(image_part(block, field, memory))
            case "tool_result" if role == "user":
                # Here results are blocks of a user's message; in `Call.messages` each is a message of the role tool.
                if parts:
                    yield {"role": role, "content": _joined(parts)}
                    parts = []
                result = fields.read(_ToolResult, block, field)
                content = content_of(result.content, f"{field}.content", fields.LINES, memory)
                yield {"role": "tool", "content": content, "tool_call_id": result.tool_use_id}
            case kind:
                raise _unsupported(kind, field, "blocks of type text or tool_result")
    if parts or not blocks:
        yield {"role": role, "content": _joined(parts)}


def _joined(parts: list[JsonObject]) -> Content:
    has_images = any(part["type"] == "image" for part in parts)
    return parts if has_images else fields.LINES.join(part["text"] for part in parts)


def _arguments(use: _ToolUse, memory: SessionMemory) -> str:
    """Returns the text that the policy has written, where the object is equal to it."""
    # The text decides whether the policy's tokens stay, and an object does not have its spaces and order of keys.
    written = memory.arguments(use.id)
    if written is not None and _input(written) == use.input:
        return written
    if _is_malformed(use.input):
        return str(use.input[MALFORMED])
    return json.dumps(use.input, ensure_ascii=False)


def _input(arguments: str) -> JsonObject:
    value = fields.json_object(arguments)
    return {MALFORMED: arguments} if value is None or _is_malformed(value) else value


def _is_malformed(value: JsonObject) -> bool:
    return set(value) == {MALFORMED} and isinstance(value[MALFORMED], str)


@dataclass(frozen=True)
class MessagesExchange(Exchange):
    """A request for a message of Anthropic's."""

    def written(self, reply: Reply) -> JsonObject:
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.call.model,
            "content": _blocks(reply),
            "stop_reason": _stop_reason(reply),
            "stop_sequence": reply.stopped if reply.finish == "stop" else None,
            # Cached tokens are counted separately here; in OpenAI's APIs they are part of the prompt.
            "usage": {
                "input_tokens": reply.prompt_tokens - reply.cached_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": reply.cached_tokens,
                "output_tokens": len(reply.tokens),
            },
        }

    def events(self, body: JsonObject, earlier: int = 0) -> Iterator[bytes]:
        start = body | {"content": [], "stop_reason": None, "stop_sequence": None}
        start["usage"] = body["usage"] | {"output_tokens": 0}
        yield _event("message_start", message=start)
        for index, block in enumerate(body["content"]):
            empty, deltas = _parts(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        delta = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
        yield _event("message_delta", delta=delta, usage=body["usage"])
        yield _event("message_stop")

    def keep_alive(self, earlier: int) -> bytes:
        return _event("ping")  # which clients skip

    def error_event(self, error: RequestError, earlier: int) -> bytes:
        return sse(Messages().error(error), "error")


def _blocks(reply: Reply) -> list[JsonObject]:
    # A message has at least one block, also where the policy has written no text.
    blocks: list[JsonObject] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": SIGNATURE})
    if reply.text or not (reply.reasoning or reply.tool_calls):
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
    return blocks


def _stop_reason(reply: Reply) -> str:
    if reply.finish == "stop":
        return "end_turn" if reply.stopped is None else "stop_sequence"
    return {"length": "max_tokens", "tool_calls": "tool_use"}[reply.finish]


def _parts(block: JsonObject) -> tuple[JsonObject, list[JsonObject]]:
    """Returns the beginning of a block in a stream, and its deltas."""
    match block["type"]:
        case "thinking":
            thinking = {"type": "thinking_delta", "thinking": block["thinking"]}
            signature = {"type": "signature_delta", "signature": block["signature"]}
            return block | {"thinking": "", "signature": ""}, [thinking, signature]
        case "tool_use":
            # Clients join the deltas of the arguments as text, and parse them at the end of the block.
            arguments = json.dumps(block["input"])
            return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]
        case _:
            return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]


def _event(kind: str, **content: Any) -> bytes:
    return sse({"type": kind} | content, kind)
