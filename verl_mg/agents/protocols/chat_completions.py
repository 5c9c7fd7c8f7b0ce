"""Protocol `/v1/chat/completions` of OpenAI.

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

from verl_mg.agents.call import Call, Reply, RequestError
from verl_mg.agents.protocols import exchange
from verl_mg.agents.protocols.exchange import Exchange, JsonObject, Protocol, sse
from verl_mg.agents.protocols.fields import (
    LINES,
    PIECES,
    Count,
    Fields,
    Function,
    Name,
    Texts,
    is_tool_choice,
    read,
    refusal,
    refuse_unless,
    text_of,
    with_one_system,
)
from verl_mg.agents.protocols.images import Content, content_of
from verl_mg.agents.protocols.memory import SessionMemory


class _CalledFunction(Fields):
    name: Name
    arguments: str


class _ToolCall(Fields):
    id: Name
    type: Literal["function"] = "function"
    function: _CalledFunction


class _Message(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    reasoning_content: str | None = None
    reasoning: Any = None  # the newer name in vLLM and at OpenRouter
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: Any = None


class _Tool(Fields):
    type: Literal["function"]
    function: Function


class _StreamOptions(Fields):
    include_usage: bool | None = None


class _Request(Fields):
    model: str
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Texts | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    # From here on fields that are read only to be refused: an ignored one would silently change the reply.
    top_logprobs: int | None = None
    n: int | None = None
    functions: Any = None
    modalities: Any = None
    audio: Any = None
    logit_bias: Any = None
    web_search_options: Any = None


class ChatCompletions(Protocol):
    """The protocol `/v1/chat/completions`."""

    def read(self, body: Any, memory: SessionMemory) -> Exchange:
        """Reads the body of a request; see `Protocol.read`."""
        request = read(_Request, body)
        _refuse_unsupported(request)
        return ChatExchange(
            call=Call(
                messages=with_one_system(
                    _message(message, f"messages[{i}]", memory) for i, message in enumerate(request.messages)
                ),
                tools=tuple(tool.function.tool() for tool in request.tools or () if request.tool_choice != "none"),
                model=request.model,
                # `max_tokens` is the older name, which many clients still send.
                max_tokens=request.max_completion_tokens or request.max_tokens,
                stop=tuple(request.stop or ()),
                images=memory.images,
            ),
            stream=bool(request.stream),
            logprobs=bool(request.logprobs),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            memory=memory,
        )

    def error(self, error: RequestError) -> JsonObject:
        """Returns the body of a reply that reports an error."""
        return exchange.openai_error(error)


def _refuse_unsupported(request: _Request) -> None:
    refuse_unless(request.n in (None, 1), "n", request.n, "Send as many requests instead")
    refuse_unless(
        not request.top_logprobs,
        "top_logprobs",
        request.top_logprobs,
        "Use 0: only the log-probabilities of the generated tokens are known",
    )
    refuse_unless(is_tool_choice(request.tool_choice), "tool_choice", request.tool_choice, 'Use "auto" or "none"')
    refuse_unless(not request.functions, "functions", request.functions, "Use tools instead")
    refuse_unless(request.modalities in (None, [], ["text"]), "modalities", request.modalities, 'Use ["text"]')
    refuse_unless(request.audio is None, "audio", request.audio, "Remove the field: the policy writes text")
    refuse_unless(not request.logit_bias, "logit_bias", request.logit_bias, "Remove it: the policy samples freely")
    refuse_unless(
        request.web_search_options is None,
        "web_search_options",
        request.web_search_options,
        "Give the agent a tool that searches",
    )


def _message(message: _Message, field: str, memory: SessionMemory) -> JsonObject:
    refuse_unless(message.function_call is None, f"{field}.function_call", message.function_call, "Use tool_calls")
    place = f"{field}.content"
    if message.role == "assistant":
        return _assistant(message, text_of(message.content, place, PIECES), memory)
    if message.content is None:
        raise refusal(place, "missing", "Add the field to the request")
    if message.role in ("system", "developer"):  # OpenAI's newer name, which chat templates do not have
        return {"role": "system", "content": text_of(message.content, place, LINES)}
    content = content_of(message.content, place, LINES, memory)
    if message.role == "tool":
        return _tool_result(message, content, field)
    return {"role": "user", "content": content}


def _assistant(message: _Message, content: str, memory: SessionMemory) -> JsonObject:
    result: JsonObject = {"role": "assistant", "content": content}
    other_name = message.reasoning if isinstance(message.reasoning, str) else ""
    if reasoning := message.reasoning_content or other_name:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [_called(call, memory) for call in message.tool_calls]
    return result


def _called(call: _ToolCall, memory: SessionMemory) -> JsonObject:
    arguments = memory.written_arguments(call.id, call.function.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _tool_result(message: _Message, content: Content, field: str) -> JsonObject:
    if message.tool_call_id is None:
        raise refusal(f"{field}.tool_call_id", "missing", "Add the id of the tool call")
    result = {"role": "tool", "content": content, "tool_call_id": message.tool_call_id}
    return result if message.name is None else {**result, "name": message.name}


@dataclass(frozen=True)
class ChatExchange(Exchange):
    """A request for a chat completion."""

    logprobs: bool  # whether the reply has the log-probabilities of its tokens
    include_usage: bool  # whether a stream ends with an event that has the numbers of tokens
    memory: SessionMemory  # keeps the text of the tool calls' arguments

    def body(self, reply: Reply) -> JsonObject:
        """Returns the reply as a chat completion."""
        # The next request of the agent has these calls, perhaps with their arguments written in another way.
        for call in reply.tool_calls:
            self.memory.remember_arguments(call.id, call.arguments)
        message = reply.message | {"refusal": None}
        if reply.tool_calls and not reply.text:  # OpenAI writes null here, not ""
            message["content"] = None
        tokens = {"content": exchange.logprobs(reply.tokens), "refusal": None} if self.logprobs else None
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.call.model,
            "choices": [{"index": 0, "message": message, "logprobs": tokens, "finish_reason": reply.finish}],
            "usage": _usage(reply),
        }

    def events(self, body: JsonObject, earlier: int = 0) -> Iterator[bytes]:
        """Returns the chunks of a chat completion: each part of the message is one. See `Exchange.events`."""
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
        """Returns a comment, which clients skip. See `Exchange.keep_alive`."""
        return b": keep-alive\n\n"

    def error_event(self, error: RequestError, earlier: int) -> bytes:
        """Returns the event of an error; see `Exchange.error_event`."""
        return sse(exchange.openai_error(error))


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
        "completion_tokens_details": {"reasoning_tokens": exchange.reasoning_tokens(reply)},
    }
