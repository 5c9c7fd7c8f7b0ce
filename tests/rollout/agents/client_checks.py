"""Checks of a running endpoint with the official clients: they hold for replies of any policy.

Each function gets the URL of a session as OpenAI's client needs it (with /v1), and the key of the session. Each reply
is validated with the clients' own types, strictly.
"""

from __future__ import annotations

from typing import Any

import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

MODEL = "policy"
QUESTION = {"role": "user", "content": "What will the weather be in Bern?"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Forecast.", "parameters": SCHEMA}}
]


def valid(kind: Any, value: Any) -> Any:
    """Validates an object of a client, or parsed JSON, with a type of the client, strictly."""
    written = value if isinstance(value, dict) else value.model_dump(exclude_unset=True, warnings=False)
    return TypeAdapter(kind).validate_python(written, strict=True)


def returned(message: Any) -> dict[str, Any]:
    """A message of a reply as agents send it back."""
    return message.model_dump(exclude_none=True)


def check_chat(base_url: str, key: str) -> None:
    """Chat completions: a conversation with tools, log-probabilities, streams."""
    client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[QUESTION], tools=CHAT_TOOLS, logprobs=True, temperature=0.3, max_tokens=64
    )
    completion = valid(ChatCompletion, raw.http_response.json())
    choice = completion.choices[0]
    assert len(choice.logprobs.content) == completion.usage.completion_tokens > 0
    assert all(token.logprob <= 0 for token in choice.logprobs.content)
    conversation = [QUESTION, returned(choice.message)]
    for call in choice.message.tool_calls or ():
        conversation.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    second = client.chat.completions.create(model=MODEL, messages=conversation, tools=CHAT_TOOLS, max_tokens=64)
    assert valid(ChatCompletion, second).usage.prompt_tokens > 0
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[QUESTION],
            tools=CHAT_TOOLS,
            stream=True,
            logprobs=True,
            max_completion_tokens=64,
            stream_options={"include_usage": True},
        )
    )
    _check_chunks([valid(ChatCompletionChunk, chunk) for chunk in chunks])


def _check_chunks(chunks: list[ChatCompletionChunk]) -> None:
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count(None) == len(chunks) - 2
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    tokens = [token for chunk in chunks[:-1] if (held := chunk.choices[0].logprobs) for token in held.content or ()]
    assert len(tokens) == chunks[-1].usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


async def check_chat_async(base_url: str, key: str) -> None:
    """Chat completions with the asynchronous client, and its helper that accumulates a stream."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0)
    completion = await client.chat.completions.create(model=MODEL, messages=[QUESTION], max_tokens=64)
    valid(ChatCompletion, completion)
    async with client.chat.completions.stream(model=MODEL, messages=[QUESTION], max_tokens=64) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].finish_reason in ("stop", "length", "tool_calls")


def check_models(base_url: str, key: str) -> None:
    """Lists of models with OpenAI's client."""
    client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
    names = [valid(openai.types.Model, model).id for model in client.models.list()]
    assert client.models.retrieve(names[0]).id == names[0]


def check_errors(base_url: str, key: str) -> None:
    """Errors of OpenAI's client: wrong key, unknown session, and a request that cannot be honoured."""
    client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
    ask = {"model": MODEL, "messages": [QUESTION]}
    for other, status in (
        (client.with_options(api_key="wrong"), 401),
        (client.with_options(base_url=base_url.replace("/sessions/", "/sessions/no-")), 404),
    ):
        try:
            other.chat.completions.create(**ask)
        except openai.APIStatusError as error:
            assert error.status_code == status and "\n" not in error.message
        else:
            raise AssertionError(status)
    try:
        client.chat.completions.create(**ask, n=2)
    except openai.BadRequestError as error:
        assert error.param == "n" and error.body["message"].startswith("n: 2 is not supported. ")
    else:
        raise AssertionError("n=2")
