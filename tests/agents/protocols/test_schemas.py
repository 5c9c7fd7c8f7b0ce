"""Replies and errors against the types of the official clients, strictly and field by field."""

import json
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from tests.agents.protocols.exchanges import APIS, CHAT, MESSAGES, RESPONSES, exchange_of, sent_events
from verl_mg.agents.call import Reply, ReplyToken, RequestError
from verl_mg.agents.tool_calls import ToolCall

anthropic_types = pytest.importorskip("anthropic.types")
chat_types = pytest.importorskip("openai.types.chat")
response_types = pytest.importorskip("openai.types.responses")

Json = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "search", "description": "Searches.", "parameters": SCHEMA}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CHAT_FIELDS = {"tools": [{"type": "function", "function": FUNCTION}], "logprobs": True}
RESPONSE = {
    "instructions": "Be brief.",
    "tools": [{"type": "function", "strict": False} | FUNCTION, {"type": "custom", "name": "patch"}],
    "include": ["message.output_text.logprobs"],
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
}
MESSAGE = {"stop_sequences": ["end"]}


def reply_of(text: str, reasoning: str, finish: Any, *calls: ToolCall, stopped: str | None = None) -> Reply:
    tokens = tuple(ReplyToken(ord(letter), letter, -0.5) for letter in reasoning + text)
    return Reply(text, reasoning, calls, finish, tokens, 9, 4, stopped)


CALLS = (ToolCall("c1", "search", '{"city": "Bern"}'), ToolCall("c2", "patch", '{"input": "+"}'))
REPLIES = {
    "reasoning and text": reply_of("Yes.", "I think.", "stop"),
    "text and calls": reply_of("Wait.", "I search.", "tool_calls", *CALLS),
    "calls alone": reply_of("", "", "tool_calls", *CALLS),
    "nothing": reply_of("", "", "stop"),
    "cut text": reply_of("Ye", "", "length"),
    "cut reasoning": reply_of("", "I th", "length"),
    "stop sequence": reply_of("In the ", "", "stop", stopped="end"),
}


def unwritten(value: Any) -> set[str]:
    """Fields that a client knows and that are absent, as "Type.field"."""
    if isinstance(value, BaseModel):
        kind, written = type(value), value.model_fields_set
        absent = {f"{kind.__name__}.{name}" for name in kind.model_fields if name not in written}
        return absent.union(*(unwritten(getattr(value, name)) for name in written))
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*map(unwritten, inner))


def check(path: str, fields: Json, whole: Any, event: Any, reply: Reply, absent: set[str]) -> None:
    """Validates the reply and its events, whose absent fields are among some that a policy has no values for."""
    body = json.loads(json.dumps(exchange_of(path, fields).body(reply)))
    found = unwritten(TypeAdapter(whole).validate_python(body, strict=True))
    streamed = exchange_of(path, fields | STREAM)
    events, adapter = list(sent_events(streamed, streamed.body(reply))), TypeAdapter(event)
    for sent in events:
        found |= unwritten(adapter.validate_python(sent, strict=True))
    assert events and found <= absent, sorted(found - absent)


@pytest.mark.parametrize("name", REPLIES)
def test_chat_completion_satisfies_the_types_of_openai(name):
    kinds = ("ChatCompletion", "ChatCompletionChunk")
    absent = {f"{kind}.{field}" for kind in kinds for field in ("service_tier", "system_fingerprint")}
    absent |= {f"ChatCompletionMessage.{field}" for field in ("annotations", "audio", "function_call", "tool_calls")}
    absent |= {f"ChoiceDelta.{field}" for field in ("content", "function_call", "refusal", "role", "tool_calls")}
    parts = ("accepted_prediction", "audio", "rejected_prediction")
    absent |= {f"CompletionTokensDetails.{part}_tokens" for part in parts} | {"PromptTokensDetails.audio_tokens"}
    whole, event = chat_types.ChatCompletion, chat_types.ChatCompletionChunk
    check(CHAT, CHAT_FIELDS, whole, event, REPLIES[name], absent)


@pytest.mark.parametrize("name", REPLIES)
def test_response_satisfies_the_types_of_openai(name):
    limits = ("max_tool_calls", "temperature", "top_logprobs", "top_p", "service_tier", "safety_identifier", "user")
    prompt = ("conversation", "prompt", "prompt_cache_key", "prompt_cache_retention")
    absent = {f"Response.{field}" for field in (*limits, *prompt)}
    absent |= {"CustomTool.description", "CustomTool.format", "ResponseReasoningItem.status"}
    absent |= {"Reasoning.generate_summary", "Reasoning.summary", "ResponseTextConfig.verbosity"}
    whole, event = response_types.Response, response_types.ResponseStreamEvent
    check(RESPONSES, RESPONSE, whole, event, REPLIES[name], absent)


@pytest.mark.parametrize("name", REPLIES)
def test_message_satisfies_the_types_of_anthropic(name):
    absent = {f"Message.{field}" for field in ("container", "diagnostics", "stop_details")}
    absent |= {f"Delta.{field}" for field in ("container", "stop_details")}
    absent |= {"TextBlock.citations", "ToolUseBlock.caller", "ToolUseBlock.toolset_name"}
    both = ("output_tokens_details", "server_tool_use")
    absent |= {f"Usage.{field}" for field in (*both, "cache_creation", "inference_geo", "service_tier", "speed")}
    absent |= {f"MessageDeltaUsage.{field}" for field in both}
    whole, event = anthropic_types.Message, anthropic_types.RawMessageStreamEvent
    check(MESSAGES, MESSAGE, whole, event, REPLIES[name], absent)


@pytest.mark.parametrize("status", [400, 401, 404, 413, 500, 503])
def test_error_satisfies_the_types_of_both_clients(status):
    from openai.types.shared import ErrorObject

    error = RequestError(status, "messages: too long. Send fewer.", "messages", "context_length_exceeded")
    for path in (CHAT, RESPONSES):
        written = APIS[path].error(error)["error"]
        assert unwritten(TypeAdapter(ErrorObject).validate_python(written, strict=True)) == set()
        # What litellm recognizes.
        assert "this model's maximum context length is" in written["message"].lower()
    if status != 413:  # request_too_large is in the API's documentation and not in its client
        kind = TypeAdapter(anthropic_types.ErrorResponse)
        assert unwritten(kind.validate_python(APIS[MESSAGES].error(error), strict=True)) <= {"ErrorResponse.request_id"}
