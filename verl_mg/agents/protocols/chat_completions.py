"""The API `/v1/chat/completions` of OpenAI.

Reasoning is written as `reasoning_content` of the message, as DeepSeek, vLLM and SGLang do. Sampling parameters
(temperature, top_p, seed, penalties) are accepted and ignored, and so are formats of the reply (`response_format`),
`parallel_tool_calls` and a `tool_choice` that forces a call: the policy samples freely.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from verl_mg.agents.call import Call, Reply, RequestError, assistant_message
from verl_mg.agents.protocols import ChatApi, Exchange, JsonObject, fields, logprobs, reasoning_tokens, sse
from verl_mg.agents.protocols.memory import SessionMemory, message_of
from verl_mg.agents.tool_calls import ToolCall


class _CalledFunction(fields.Fields):
    name: fields.Name
    arguments: str


class _ToolCall(fields.Fields):
    id: fields.Name
    type: Literal["function"] = "function"
    function: _CalledFunction


class _Message(fields.Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    reasoning_content: str | None = None
    reasoning: Any = None  # the newer name in vLLM and at OpenRouter
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: Any = None


class _Tool(fields.Fields):
    type: Literal["function"]
    function: fields.Function


class _StreamOptions(fields.Fields):
    include_usage: bool | None = None


class _Request(fields.Fields):
    model: str
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    max_tokens: fields.Count | None = None
    max_completion_tokens: fields.Count | None = None
    stop: fields.Texts | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None


UNSUPPORTED: fields.Supported = {
    "n": ((1,), "Send as many requests instead"),
    **fields.TOP_LOGPROBS,
    "functions": (fields.NOTHING, "Use tools instead"),
    "modalities": (([], ["text"]), 'Use ["text"]'),
    "audio": ((), "Remove the field: the policy writes text"),
    "logit_bias": (fields.NOTHING, "Remove it: the policy samples freely"),
    "web_search_options": ((), "Give the agent a tool that searches"),
}


class ChatCompletions(ChatApi):
    """The API `/v1/chat/completions` of OpenAI."""

    def read(self, body: Any, memory: SessionMemory) -> Exchange:
        request = fields.read(_Request, body)
        fields.refuse_others(body, UNSUPPORTED)
        offered = fields.offers_tools(request.tool_choice)
        return ChatExchange(
            call=Call(
                messages=fields.with_one_system(
                    _message(message, f"messages[{i}]", memory) for i, message in enumerate(request.messages)
                ),
                tools=tuple(tool.function.tool() for tool in request.tools or () if offered),
                model=request.model,
                # `max_tokens` is the older name, which many clients still send.
                max_tokens=request.max_completion_tokens or request.max_tokens,
                stop=tuple(request.stop or ()),
                images=memory.images,
            ),
            stream=bool(request.stream),
            memory=memory,
            logprobs=bool(request.logprobs),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
        )


def _message(message: _Message, field: str, memory: SessionMemory) -> JsonObject:
    if message.function_call is not None:
        raise fields.unsupported(f"{field}.function_call", message.function_call, "Use tool_calls")
    if message.role == "assistant":
        text = fields.text_of(message.content, f"{field}.content", fields.PIECES)
        other_name = message.reasoning if isinstance(message.reasoning, str) else ""
        calls = [
            ToolCall(call.id, call.function.name, memory.written_arguments(call.id, call.function.arguments))
            for call in message.tool_calls or ()
        ]
        return assistant_message(text, message.reasoning_content or other_name, calls)
    result = message_of(message.role, message.content, f"{field}.content", memory)
    if message.role == "tool":
        if message.tool_call_id is None:
            raise fields.refusal(f"{field}.tool_call_id", "missing", "Add the id of the tool call")
        result["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            result["name"] = message.name
    return result


@dataclass(frozen=True)
class ChatExchange(Exchange):
    """A request for a chat completion."""

    logprobs: bool  # whether the reply has the log-probabilities of its tokens
    include_usage: bool  # whether a stream ends with an event that has the numbers of tokens

    def written(self, reply: Reply) -> JsonObject:
        message = reply.message | {"refusal": None}
        if reply.tool_calls and not reply.text:  # OpenAI writes null here, not ""
            message["content"] = None
        tokens = {"content": logprobs(reply.tokens), "refusal": None} if self.logprobs else None
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.call.model,
            "choices": [{"index": 0, "message": message, "logprobs": tokens, "finish_reason": reply.finish}],
            "usage": _usage(reply),
        }

    def events(self, body: JsonObject, earlier: int = 0) -> Iterator[bytes]:
        chunk = {name: body[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        usage = {"usage": None} if self.include_usage else {}
        choice = body["choices"][0]
        tokens = choice["logprobs"]
        for delta in _deltas(choice["message"]):
            yield sse(chunk | {"choices": [_choice(delta, None, tokens)]} | usage)
            tokens = None  # in the first chunk, since the log-probabilities are of all parts of the message
        yield sse(chunk | {"choices": [_choice({}, choice["finish_reason"], None)]} | usage)
        if self.include_usage:
            yield sse(chunk | {"choices": [], "usage": body["usage"]})
        yield sse("[DONE]")

    def keep_alive(self, earlier: int) -> bytes:
        return b": keep-alive\n\n"  # a comment, which clients skip

    def error_event(self, error: RequestError, earlier: int) -> bytes:
        return sse(ChatCompletions().error(error))


def _choice(delta: JsonObject, finish: str | None, logprobs: JsonObject | None) -> JsonObject:
    return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _deltas(message: JsonObject) -> Iterator[JsonObject]:
    # As OpenAI's streams begin: clients take the role from the first delta, and join the others.
    yield {"role": "assistant", "content": ""}
    if "reasoning_content" in message:
        yield {"reasoning_content": message["reasoning_content"]}
    if message["content"]:
        yield {"content": message["content"]}
    for index, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": index} | call]}


def _usage(reply: Reply) -> JsonObject:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": len(reply.tokens),
        "total_tokens": reply.prompt_tokens + len(reply.tokens),
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens(reply)},
    }
