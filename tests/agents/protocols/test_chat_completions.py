"""Requests for chat completions, as harnesses send them, and the messages that the backend gets."""

from __future__ import annotations

from typing import Any

import pytest

from verl_mg.agents.call import Call, RequestError
from verl_mg.agents.protocols.chat_completions import ChatCompletions
from verl_mg.agents.protocols.memory import SessionMemory


def call_of(**fields: Any) -> Call:
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]} | fields
    return ChatCompletions().read(body, SessionMemory()).call


def test_chat_request_given_every_role_keeps_messages_as_they_are() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    sent = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "system", "content": "c", "name": "ignored"},
        {"role": "user", "content": ""},
        {"role": "system", "content": "Late"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": [{"type": "text", "text": "e"}, {"type": "text", "text": "f"}]},
        # As litellm writes a message of a reply.
        {"role": "assistant", "content": None, "tool_calls": [call], "function_call": None, "reasoning": "g"},
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": [{"type": "text", "text": "h"}]},
    ]
    assert call_of(messages=sent).messages == (
        {"role": "system", "content": "a\nb\nc"},
        {"role": "user", "content": ""},
        {"role": "system", "content": "Late"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "ef"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "g"},
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "h"},
    )


def test_chat_request_given_tools_writes_name_description_and_parameters() -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object", "x": [1]}}},
        {"type": "function", "function": {"name": "g", "description": "G."}},
    ]
    empty = {"type": "object", "properties": {}}
    assert call_of(tools=tools).tools == (
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": [1]}}},
        {"type": "function", "function": {"name": "g", "description": "G.", "parameters": empty}},
    )
    assert call_of(tools=tools, tool_choice="none").tools == ()
    forced = {"type": "function", "function": {"name": "f"}}
    assert all(call_of(tools=tools, tool_choice=choice).tools for choice in ("auto", "required", forced, None))


def test_chat_request_given_limits_and_sampling_parameters_keeps_only_limits() -> None:
    call = call_of(
        max_tokens=5, max_completion_tokens=7, stop="end", temperature=0.1, top_p=0.5, seed=3, presence_penalty=1, n=1
    )
    assert (call.max_tokens, call.stop, call.model) == (7, ("end",), "policy")
    assert call_of(max_tokens=5, stop=["a", "b"]).stop == ("a", "b") and call_of(stop=None).stop == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "any"}, 'tool_choice: "any" is not supported. Use "auto" or "none".'),
        ({"n": 2}, "n: 2 is not supported. Send as many requests instead."),
        ({"model": None}, "model: input should be a valid string. Correct the field."),
        ({"max_tokens": 1.0}, "max_tokens: input should be a valid integer. Correct the field."),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            'messages[0].content[0].type: "image_url" is not supported. The policy reads text: send parts of text.',
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "messages[1].tool_calls[0].function: missing. Add the field to the request.",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id: missing. Add the id of the tool"),
    ],
)
def test_chat_request_given_wrong_field_names_it(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        call_of(**fields)
    assert caught.value.message.startswith(message) and caught.value.status == 400
    assert caught.value.param == message.split(":")[0]
