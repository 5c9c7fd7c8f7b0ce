"""Requests for messages, as harnesses send them, and the messages that the backend gets."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from verl_mg.agents.call import Reply, ReplyToken, RequestError, ToolCall
from verl_mg.agents.protocols.exchange import Exchange
from verl_mg.agents.protocols.memory import SessionMemory
from verl_mg.agents.protocols.messages import Messages


def exchange_of(**fields: Any) -> Exchange:
    body = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]} | fields
    return Messages().read(body, SessionMemory())


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def test_message_request_of_claude_code_becomes_messages() -> None:
    sent = [
        {"role": "user", "content": [text("<reminder/>"), text("Fix it")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "s"},
                text("Looking."),
                {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls", "ü": 1}},
                {"type": "tool_use", "id": "t2", "name": "Read", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "a.py"},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": [text("no"), text("file")]},
                {"type": "tool_result", "tool_use_id": "t3"},
                text("Continue"),
            ],
        },
    ]
    call = exchange_of(
        system=[text("You are Claude Code."), text("Rules.")],
        messages=sent,
        tools=[{"name": "Bash", "description": "Runs.", "input_schema": {"type": "object"}, "cache_control": {}}],
        metadata={"user_id": "u"},
        thinking={"type": "adaptive"},
        temperature=1,
        context_management={"edits": []},
        output_config={"effort": "high"},
        stop_sequences=["end"],
    ).call

    def called(name: str, function: str, arguments: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}

    assert call.messages == (
        {"role": "system", "content": "You are Claude Code.\nRules."},
        {"role": "user", "content": "<reminder/>\nFix it"},
        {
            "role": "assistant",
            "content": "Looking.",
            "reasoning_content": "I look.",
            "tool_calls": [called("t1", "Bash", '{"command": "ls", "ü": 1}'), called("t2", "Read", "{}")],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "a.py"},
        {"role": "tool", "tool_call_id": "t2", "content": "no\nfile"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "Continue"},
    )
    bash = {"name": "Bash", "description": "Runs.", "parameters": {"type": "object"}}
    assert call.tools == ({"type": "function", "function": bash},)
    assert (call.max_tokens, call.stop) == (9, ("end",))


def test_message_request_given_tool_choice_offers_tools_unless_it_is_none() -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    for choice in ({"type": "auto"}, {"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "f"}):
        assert exchange_of(tools=tools, tool_choice=choice).call.tools
    assert exchange_of(tools=tools, tool_choice={"type": "none"}).call.tools == ()
    with pytest.raises(RequestError, match="^tool_choice.type: input should be "):
        exchange_of(tools=tools, tool_choice={"type": "required"})


def test_message_request_given_system_messages_at_the_beginning_joins_them() -> None:
    late = {"role": "system", "content": "Late"}
    sent = [{"role": "system", "content": [text("b")]}, {"role": "user", "content": "c"}, late]
    user = {"role": "user", "content": "c"}
    assert exchange_of(system="a", messages=sent).call.messages == ({"role": "system", "content": "a\nb"}, user, late)


@pytest.mark.parametrize(
    ("stopped", "finish", "reason"),
    [
        (None, "stop", ("end_turn", None)),
        (None, "length", ("max_tokens", None)),
        (None, "tool_calls", ("tool_use", None)),
        ("end", "stop", ("stop_sequence", "end")),
        ("end", "tool_calls", ("tool_use", None)),
    ],
)
def test_message_given_end_of_the_reply_names_the_reason(
    stopped: str | None, finish: Literal["stop", "length", "tool_calls"], reason: tuple[str, str | None]
) -> None:
    calls = (ToolCall("t1", "f", "{}"),) if finish == "tool_calls" else ()
    tokens = (ReplyToken(7, "Yes.", -1.0),)
    body = exchange_of(stop_sequences=["no", "end"]).body(Reply("Yes.", "", calls, finish, tokens, 9, 4, stopped))
    assert (body["stop_reason"], body["stop_sequence"]) == reason
    assert body["usage"]["input_tokens"] == 5 and body["usage"]["cache_read_input_tokens"] == 4


def test_message_given_malformed_arguments_writes_their_text() -> None:
    calls = (ToolCall("t1", "f", '{"a": '), ToolCall("t2", "f", '{"malformed_arguments": "x"}'))
    blocks = exchange_of().body(Reply("", "", calls, "tool_calls", (), 9, 4))["content"]
    assert [block["input"] for block in blocks] == [
        {"malformed_arguments": '{"a": '},
        {"malformed_arguments": '{"malformed_arguments": "x"}'},
    ]


def test_message_error_of_a_long_context_begins_as_clients_expect() -> None:
    error = RequestError(400, "messages: 9 tokens. Send fewer.", "messages", "context_length_exceeded")
    expected = {"type": "invalid_request_error", "message": "prompt is too long: messages: 9 tokens. Send fewer."}
    assert Messages().error(error) == {"type": "error", "error": expected}
