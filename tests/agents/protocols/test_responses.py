"""Requests for responses, as harnesses send them, and the messages that the backend gets."""

from __future__ import annotations

from typing import Any

import pytest

from verl_mg.agents.call import Reply, ToolCall
from verl_mg.agents.protocols import memory as session_memory
from verl_mg.agents.protocols.exchange import Exchange
from verl_mg.agents.protocols.memory import SessionMemory
from verl_mg.agents.protocols.responses import Responses

REPLY = Reply("Yes.", "", (), "stop", (), 9, 4)


def exchange_of(memory: SessionMemory | None = None, **fields: Any) -> Exchange:
    return Responses().read({"model": "policy", "input": "Hello"} | fields, memory or SessionMemory())


def test_response_request_of_codex_becomes_messages() -> None:
    sent = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "SSBsb29rLg=="},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
        {"type": "function_call", "name": "shell", "arguments": '{"a":1}', "call_id": "c1"},
        {"type": "function_call", "name": "read", "namespace": "mcp__fs__", "arguments": "{}", "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "text"}]},
    ]
    tools = [
        {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}},
        {"type": "web_search", "external_web_access": False},
        {
            "type": "namespace",
            "name": "mcp__fs__",
            "description": "Files",
            "tools": [{"type": "function", "name": "read"}],
        },
    ]
    call = exchange_of(
        instructions="You are Codex.",
        input=sent,
        tools=tools,
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        client_metadata={"x": "y"},
    ).call
    assert call.messages == (
        {"role": "system", "content": "You are Codex.\nRules"},
        {"role": "user", "content": "Fix it"},
        {
            "role": "assistant",
            "reasoning_content": "I look.",
            "content": "Looking.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"a":1}'}},
                {"id": "c2", "type": "function", "function": {"name": "mcp__fs__read", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "tool", "tool_call_id": "c2", "content": "text"},
    )
    assert [tool["function"]["name"] for tool in call.tools] == ["shell", "mcp__fs__read"]
    for choice in ("required", {"type": "function", "name": "shell"}):
        assert exchange_of(tools=tools, tool_choice=choice).call.tools == call.tools
    assert exchange_of(tools=tools, tool_choice="none").call.tools == ()


def test_response_given_tools_of_codex_writes_calls_in_their_form() -> None:
    tools = [
        {"type": "custom", "name": "apply_patch", "description": "Edits files."},
        {"type": "namespace", "name": "mcp__fs", "tools": [{"type": "function", "name": "read"}]},
    ]
    calls = (ToolCall("c1", "apply_patch", '{"input": "*** Begin"}'), ToolCall("c2", "mcp__fs__read", "{}"))
    output = exchange_of(tools=tools).body(Reply("", "", calls, "tool_calls", (), 9, 4))["output"]
    assert [item.pop("id")[:3] for item in output] == ["ctc", "fc_"]
    assert output == [
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {
            "type": "function_call",
            "call_id": "c2",
            "name": "read",
            "namespace": "mcp__fs",
            "arguments": "{}",
            "status": "completed",
        },
    ]


def test_response_request_given_two_replies_in_a_row_keeps_them_apart() -> None:
    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text}

    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "c"}]}
    call = exchange_of(input=[said("a"), said("b"), thought, said("d")]).call
    assert call.messages == (
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "reasoning_content": "c", "content": "d"},
    )


def test_response_continued_drops_the_earlier_instructions() -> None:
    memory = SessionMemory()
    first = exchange_of(memory, instructions="Old", input="One").body(REPLY)["id"]
    second = exchange_of(memory, instructions="New", input="Two", previous_response_id=first).body(REPLY)["id"]
    call = exchange_of(memory, input="Three", previous_response_id=second).call
    assert [message["content"] for message in call.messages] == ["One", "Yes.", "Two", "Yes.", "Three"]


@pytest.mark.parametrize(("limit", "value"), [("MAX_RESPONSES", 2), ("MAX_CHARACTERS", 300)])
def test_memory_above_its_limit_drops_the_oldest(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(session_memory, limit, value)
    memory = SessionMemory()
    names = [exchange_of(memory).body(REPLY)["id"] for _ in range(6)]
    assert memory.response(names[0]) is None and memory.response(names[-1]) is not None
    body = exchange_of(memory, store=False).body(REPLY)
    assert memory.response(body["id"]) is None and body["store"] is False
