"""Recorded requests and replies of each API, and what a session keeps between them."""

import json
import re
from typing import Any

import pytest

from tests.agents.protocols.exchanges import RECORDED, RESPONSES, exchange_of
from verl_mg.agents.call import Reply, ReplyToken, RequestError
from verl_mg.agents.protocols import memory as session_memory
from verl_mg.agents.protocols.memory import SessionMemory
from verl_mg.agents.protocols.messages import Messages
from verl_mg.agents.tool_calls import ToolCall

YES = Reply("Yes.", "", (), "stop", (), 9, 4)


def recorded(kind: str) -> list[Any]:
    return [pytest.param(path, name, id=f"{path} {name}") for path in RECORDED for name in RECORDED[path][kind]]


@pytest.mark.parametrize(("path", "name"), recorded("calls"))
def test_recorded_request_becomes_the_call(path, name):
    case = RECORDED[path]["calls"][name]
    call = vars(exchange_of(path, case["sent"]).call)
    assert json.loads(json.dumps({field: call[field] for field in case["call"]})) == case["call"]


@pytest.mark.parametrize(("path", "name"), recorded("replies"))
def test_recorded_reply_is_written_to_its_request(path, name):
    case = RECORDED[path]["replies"][name]
    given = {"text": "", "reasoning": "", "stopped": None} | case["reply"]
    given["tool_calls"] = tuple(ToolCall(*call) for call in given["tool_calls"])
    tokens = (ReplyToken(7, given["text"], -1.0),)
    body = exchange_of(path, case["sent"]).body(Reply(**given, tokens=tokens, prompt_tokens=9, cached_tokens=4))
    written = json.loads(re.sub("[0-9a-f]{32}", "ID", json.dumps(body)))
    assert {field: written[field] for field in case["body"]} == case["body"]


@pytest.mark.parametrize(
    ("path", "fields", "message"), [(path, *case) for path in RECORDED for case in RECORDED[path]["refused"]]
)
def test_recorded_request_that_cannot_be_honoured_names_the_field(path, fields, message):
    with pytest.raises(RequestError) as caught:
        exchange_of(path, fields)
    assert (caught.value.status, caught.value.message) == (400, message)
    assert caught.value.param == message.partition(": ")[0]


def test_message_error_of_a_long_context_begins_as_clients_expect():
    error = RequestError(400, "messages: 9 tokens. Send fewer.", "messages", "context_length_exceeded")
    expected = {"type": "invalid_request_error", "message": "prompt is too long: messages: 9 tokens. Send fewer."}
    assert Messages().error(error) == {"type": "error", "error": expected}


def test_response_continued_drops_the_earlier_instructions():
    memory = SessionMemory()
    first = exchange_of(RESPONSES, {"instructions": "Old", "input": "One"}, memory).body(YES)["id"]
    again = {"instructions": "New", "input": "Two", "previous_response_id": first}
    second = exchange_of(RESPONSES, again, memory).body(YES)["id"]
    call = exchange_of(RESPONSES, {"input": "Three", "previous_response_id": second}, memory).call
    assert [message["content"] for message in call.messages] == ["One", "Yes.", "Two", "Yes.", "Three"]


@pytest.mark.parametrize(("limit", "value"), [("MAX_RESPONSES", 2), ("MAX_CHARACTERS", 300)])
def test_memory_above_its_limit_drops_the_oldest(monkeypatch, limit, value):
    monkeypatch.setattr(session_memory, limit, value)
    memory = SessionMemory()
    names = [exchange_of(RESPONSES, {}, memory).body(YES)["id"] for _ in range(6)]
    assert memory.response(names[0]) is None and memory.response(names[-1]) is not None
    body = exchange_of(RESPONSES, {"store": False}, memory).body(YES)
    assert memory.response(body["id"]) is None and body["store"] is False
