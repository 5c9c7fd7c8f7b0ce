"""Checks of a running endpoint with the official clients: they hold for replies of any policy.

Each function gets the URL of a session as OpenAI's client needs it (with /v1), and the key of the session. Each reply
is validated with the clients' own types, strictly.
"""

import functools
import json
from typing import Any

import anthropic
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

MODEL, LOGPROBS = "policy", "message.output_text.logprobs"
QUESTION = {"role": "user", "content": "What will the weather be in Bern?"}
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["city"]}
CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Forecast.", "parameters": SCHEMA}}
]
STRICT = SCHEMA | {"required": ["city", "days"], "additionalProperties": False}
STRICT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": STRICT, "strict": True}}
]
"""The helper for streams takes no other tools."""
RESPONSE_TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}]
MESSAGE_TOOLS: list[Any] = [{"name": "get_weather", "description": "Forecast.", "input_schema": SCHEMA}]


_adapter = functools.cache(TypeAdapter)  # takes a second for the events of responses


def valid(kind: Any, value: Any) -> Any:
    """Validates an object of a client, or parsed JSON, with a type of the client, strictly."""
    written = value if isinstance(value, dict) else value.model_dump(exclude_unset=True, warnings=False)
    return _adapter(kind).validate_python(written, strict=True)


def _openai(base_url: str, key: str, kind: type = openai.OpenAI) -> Any:
    return kind(base_url=base_url, api_key=key, max_retries=0)


def check_chat(base_url: str, key: str) -> None:
    """Chat completions: a conversation with tools, log-probabilities, streams."""
    client = _openai(base_url, key)
    ask = {"model": MODEL, "messages": [QUESTION], "tools": CHAT_TOOLS, "logprobs": True}
    raw = client.chat.completions.with_raw_response.create(temperature=0.3, max_tokens=64, **ask)
    completion = valid(ChatCompletion, raw.http_response.json())
    choice = completion.choices[0]
    assert len(choice.logprobs.content) == completion.usage.completion_tokens > 0
    assert all(token.logprob <= 0 for token in choice.logprobs.content)
    conversation = [QUESTION, choice.message.model_dump(exclude_none=True)]
    for call in choice.message.tool_calls or ():
        conversation.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    second = client.chat.completions.create(model=MODEL, messages=conversation, tools=CHAT_TOOLS, max_tokens=64)
    assert valid(ChatCompletion, second).usage.prompt_tokens > 0
    limits = {"max_completion_tokens": 64, "stream_options": {"include_usage": True}}
    chunks = [valid(ChatCompletionChunk, c) for c in client.chat.completions.create(stream=True, **ask, **limits)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count(None) == len(chunks) - 2
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    tokens = [token for chunk in chunks[:-1] if (held := chunk.choices[0].logprobs) for token in held.content or ()]
    assert len(tokens) == chunks[-1].usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


async def check_chat_async(base_url: str, key: str) -> None:
    """Chat completions with the asynchronous client, and its helper that accumulates a stream."""
    client = _openai(base_url, key, openai.AsyncOpenAI)
    completion = await client.chat.completions.create(model=MODEL, messages=[QUESTION], max_tokens=64)
    valid(ChatCompletion, completion)
    try:
        ask = {"model": MODEL, "messages": [QUESTION], "tools": STRICT_TOOLS, "tool_choice": "required"}
        limits = {"max_tokens": 64, "stream_options": {"include_usage": True}}
        async with client.chat.completions.stream(logprobs=True, **ask, **limits) as stream:
            async for _ in stream:
                pass
            final: ChatCompletion = await stream.get_final_completion()
        assert final.choices[0].finish_reason in ("stop", "tool_calls")
    except openai.LengthFinishReasonError as error:  # the helper raises it for a reply of 64 tokens
        final = error.completion
        assert final.choices[0].finish_reason == "length"
    (choice,) = final.choices
    assert choice.message.role == "assistant" and choice.logprobs.content
    if choice.finish_reason != "length":  # the helper has not read the usage behind it
        assert len(choice.logprobs.content) == final.usage.completion_tokens
    assert (choice.finish_reason == "tool_calls") == bool(choice.message.tool_calls)


def check_models_and_errors(base_url: str, key: str) -> None:
    """Lists of models and errors with OpenAI's client: wrong key, unknown session, a request that is not honoured."""
    client = _openai(base_url, key)
    names = [valid(openai.types.Model, model).id for model in client.models.list()]
    assert client.models.retrieve(names[0]).id == names[0]
    ask = {"model": MODEL, "messages": [QUESTION]}
    for other, status in (
        (client.with_options(api_key="wrong"), 401),
        (client.with_options(base_url=base_url.replace("/sessions/", "/sessions/no-")), 404),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            other.chat.completions.create(**ask)
        assert caught.value.status_code == status and "\n" not in caught.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ask, n=2)
    assert refused.value.param == "n" and refused.value.body["message"].startswith("n: 2 is not supported. ")


def check_responses(base_url: str, key: str) -> None:
    """Responses: a conversation with tools that is sent back, one that is stored, and streams."""
    client = _openai(base_url, key)
    ask: dict[str, Any] = {"model": MODEL, "tools": RESPONSE_TOOLS, "max_output_tokens": 64}
    brief = ask | {"instructions": "Be brief."}
    whole = {"include": [LOGPROBS, "reasoning.encrypted_content"], "reasoning": {"effort": "low"}}
    raw = client.responses.with_raw_response.create(input=[QUESTION], text={"verbosity": "low"}, **whole, **brief)
    first = valid(Response, raw.http_response.json())
    assert first.status in ("completed", "incomplete") and first.usage.output_tokens > 0
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output
        if item.type == "function_call"
    ]
    history = [QUESTION, *(item.model_dump(exclude_none=True) for item in first.output), *outputs]
    valid(Response, client.responses.create(input=[*history, {"role": "user", "content": "And then?"}], **ask))
    follow_up = [*outputs, {"role": "user", "content": [{"type": "input_text", "text": "And then?"}]}]
    second = valid(Response, client.responses.create(input=follow_up, previous_response_id=first.id, **brief))
    assert second.previous_response_id == first.id and second.usage.input_tokens > first.usage.input_tokens
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    valid(Response, client.responses.create(input=[QUESTION, *references, *follow_up], **ask))
    events = [valid(ResponseStreamEvent, event) for event in client.responses.create(input="Hi", stream=True, **ask)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type in ("response.completed", "response.incomplete")
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output and done
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == events[-1].response.output_text


async def check_responses_async(base_url: str, key: str) -> None:
    """Responses with the asynchronous client, and its helper that accumulates a stream."""
    client = _openai(base_url, key, openai.AsyncOpenAI)
    valid(Response, await client.responses.create(model=MODEL, input="Hello", store=False, max_output_tokens=64))
    ask: dict[str, Any] = {"model": MODEL, "input": "Hello", "tools": RESPONSE_TOOLS, "tool_choice": "required"}
    async with client.responses.stream(include=[LOGPROBS], max_output_tokens=64, **ask) as stream:
        events = [event async for event in stream]
    final = events[-1].response
    assert events[-1].type == f"response.{final.status}" and final.status in ("completed", "incomplete")
    if final.status == "completed":  # the helper has no other final response
        assert (await stream.get_final_response()).output == final.output
    for item in final.output:
        if item.type == "message" and item.content[0].text:
            assert len(item.content[0].logprobs) == final.usage.output_tokens


def _anthropic(base_url: str, key: str, kind: type = anthropic.Anthropic) -> Any:
    return kind(base_url=base_url.removesuffix("/v1"), api_key=key, max_retries=0)


def check_messages(base_url: str, key: str) -> None:
    """Messages: a conversation with tools, counts of tokens, streams."""
    client = _anthropic(base_url, key)
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "tools": MESSAGE_TOOLS}
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    raw = client.messages.with_raw_response.create(messages=[QUESTION], system=system, **ask)
    message = valid(anthropic.types.Message, json.loads(raw.text()))
    assert message.stop_reason in ("end_turn", "max_tokens", "tool_use") and message.usage.output_tokens > 0
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}
        for block in message.content
        if block.type == "tool_use"
    ]
    assert (message.stop_reason == "tool_use") <= bool(results)
    answer = {"role": "user", "content": [*results, {"type": "text", "text": "And then?"}]}
    history = [QUESTION, {"role": "assistant", "content": message.content}, answer]
    valid(anthropic.types.Message, client.messages.create(messages=history, system="Be brief.", **ask))
    count = client.messages.count_tokens(model=MODEL, messages=history, tools=MESSAGE_TOOLS)
    assert valid(anthropic.types.MessageTokensCount, count).input_tokens > 0
    stream = client.messages.create(messages=[QUESTION], stream=True, **ask)
    events = [valid(anthropic.types.RawMessageStreamEvent, event) for event in stream]
    assert [event.type for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    assert events[0].message.content == [] and events[-2].delta.stop_reason and events[-2].usage.output_tokens > 0
    blocks = [event for event in events if event.type == "content_block_start"]
    assert [event.index for event in blocks] == list(range(len(blocks))) and blocks


async def check_messages_async(base_url: str, key: str) -> None:
    """Messages with the asynchronous client, its beta part too, and the helpers that accumulate a stream."""
    client = _anthropic(base_url, key, anthropic.AsyncAnthropic)
    valid(anthropic.types.Message, await client.messages.create(model=MODEL, messages=[QUESTION], max_tokens=64))
    ask: dict[str, Any] = {"model": MODEL, "messages": [QUESTION], "max_tokens": 64, "tools": MESSAGE_TOOLS}
    ask["thinking"] = {"type": "adaptive"}
    beta = await client.beta.messages.create(
        betas=["interleaved-thinking-2025-05-14"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        **ask,
    )
    valid(anthropic.types.beta.BetaMessage, beta)
    for helper in (client.messages, client.beta.messages):
        async with helper.stream(tool_choice={"type": "any"}, **ask) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_message()
        assert final.stop_reason and final.usage.output_tokens > 0 and final.content


def check_anthropic_models_and_errors(base_url: str, key: str) -> None:
    """Lists of models, and errors, with Anthropic's client."""
    client = _anthropic(base_url, key)
    assert [valid(anthropic.types.ModelInfo, model.to_dict(mode="python")).id for model in client.models.list()]
    for other, expected in (
        (_anthropic(base_url, "wrong"), anthropic.AuthenticationError),
        (_anthropic(base_url.replace("/sessions/", "/sessions/no-"), key), anthropic.NotFoundError),
    ):
        with pytest.raises(expected):
            other.messages.create(model=MODEL, messages=[QUESTION], max_tokens=64)
    with pytest.raises(anthropic.BadRequestError) as caught:
        image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        client.messages.create(model=MODEL, messages=[{"role": "user", "content": [image]}], max_tokens=64)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.body["error"]["message"].startswith('messages[0].content[0].type: "image" is not supported. ')


CHECKS = [name for name in dir() if name.startswith("check_")]
"""Names of all checks; those of the asynchronous clients return a coroutine."""
