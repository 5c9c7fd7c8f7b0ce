"""A reply that comes back as a message of a later request is the message that the policy has written."""

import functools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agents.conversations import CALLS, KEEPING, QWEN3, REPLIES, SPELLINGS, THINKING, Conversation, renderer_of
from tests.agents.protocols.exchanges import CHAT, MESSAGES, RESPONSES, exchange_of, sent_events
from verl_mg.agents.call import Reply, ReplyToken
from verl_mg.agents.protocols import Exchange
from verl_mg.agents.protocols.fields import json_object, parse
from verl_mg.agents.protocols.memory import SessionMemory
from verl_mg.agents.tool_calls import ToolCall

Json = dict[str, Any]
QUESTION = {"role": "user", "content": "Hello"}
TOOLS = ("search", "patch", "mcp__files__read")
RESPONSE_TOOLS = [
    {"type": "function", "name": "search", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
    {"type": "namespace", "name": "mcp__files__", "tools": [{"type": "function", "name": "read", "parameters": {}}]},
]

numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
objects = st.dictionaries(st.sampled_from(["input", "malformed_arguments", "a", "ü", ""]), values, max_size=3)
arguments = st.one_of(
    objects.map(json.dumps),
    objects.map(lambda value: json.dumps(value, ensure_ascii=False, indent=1)),
    st.text(max_size=20),
    st.sampled_from(["", "[]", "3", "null", '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": 1e999}', '{"a": 01}', "{" * 300]),
)


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    """Replies with any text, reasoning and calls of tools, some of them unknown."""
    names = st.sampled_from((*TOOLS, "unknown"))
    calls = tuple(
        ToolCall(f"call_{number}", draw(names), draw(arguments))
        for number in range(draw(st.integers(min_value=0, max_value=3)))
    )
    text, reasoning = draw(st.text(max_size=20)), draw(st.text(max_size=20))
    tokens = tuple(ReplyToken(ord(letter), letter, draw(st.floats(max_value=0))) for letter in reasoning + text)
    return Reply(text, reasoning, calls, draw(st.sampled_from(["stop", "length", "tool_calls"])), tokens, 9, 4)


def through_json(value: Any) -> Any:
    """The value after it has been sent."""
    return parse(json.dumps(value, allow_nan=False).encode())


def read(path: str, memory: SessionMemory, **fields: Any) -> Exchange:
    """Reads a request with fields that have been sent."""
    return exchange_of(path, through_json(fields), memory)


def exchanged(path: str, reply: Reply, **fields: Any) -> tuple[SessionMemory, Exchange, Any]:
    """A session with a reply, the reply's exchange, and its body."""
    memory = SessionMemory()
    exchange = read(path, memory, **fields)
    return memory, exchange, through_json(exchange.body(reply))


def written_again(call: Json) -> Json:
    """A tool call whose arguments a client in JavaScript has read and written: 1.0 as 1, one of equal keys."""
    called = call.get("function", call)
    value = json_object(called.get("arguments", ""))
    if value is None:
        return call
    written = {"arguments": json.dumps(integers(value), separators=(",", ":"), ensure_ascii=False)}
    return call | ({"function": called | written} if "function" in call else written)


def integers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: integers(part) for key, part in reversed(value.items())}
    return list(map(integers, value)) if isinstance(value, list) else value


def of_replies(test: Any) -> Any:
    return settings(max_examples=60, deadline=None)(given(replies())(test))


@of_replies
def test_chat_completion_sent_back_is_the_message(reply):
    memory, exchange, body = exchanged(CHAT, reply, logprobs=True)
    streamed: Json = {"content": "", "tool_calls": []}
    for event in sent_events(exchange, body):
        for delta in (choice["delta"] for choice in event["choices"]):
            streamed["content"] += delta.get("content") or ""
            streamed["tool_calls"] += delta.get("tool_calls", [])
            streamed |= {name: delta[name] for name in ("role", "reasoning_content") if name in delta}
    again = {"tool_calls": list(map(written_again, streamed["tool_calls"]))}
    for message in (body["choices"][0]["message"], streamed, streamed | again):
        later = read(CHAT, memory, messages=[QUESTION, message, QUESTION])
        assert later.call.messages == (QUESTION, reply.message, QUESTION)


@of_replies
def test_response_sent_back_is_the_message(reply):
    memory, exchange, body = exchanged(RESPONSES, reply, tools=RESPONSE_TOOLS)
    events = list(sent_events(exchange, body))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == body["output"]
    # Codex drops ids, and the text of reasoning where there is encrypted content.
    dropped = [
        {key: value for key, value in item.items() if key != "id" and (key, item["type"]) != ("content", "reasoning")}
        for item in done
    ]
    references = [{"type": "item_reference", "id": item["id"]} for item in done]
    for items in (done, dropped, references, list(map(written_again, done))):
        again = read(RESPONSES, memory, tools=RESPONSE_TOOLS, input=[QUESTION, *items, QUESTION])
        assert again.call.messages == (QUESTION, reply.message, QUESTION)
    continued = read(RESPONSES, memory, tools=RESPONSE_TOOLS, previous_response_id=body["id"])
    assert continued.call.messages == (QUESTION, reply.message, QUESTION)


@of_replies
def test_message_sent_back_is_the_message(reply):
    memory, exchange, body = exchanged(MESSAGES, reply)
    streamed: list[Json] = []
    for event in sent_events(exchange, body):
        if event["type"] == "content_block_start":
            streamed.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            kind = delta.pop("type")
            if kind == "input_json_delta":
                delta = {"input": json.loads(delta["partial_json"])}
            streamed[event["index"]] |= delta
    assert streamed == body["content"]
    history = [QUESTION, {"role": "assistant", "content": streamed}, QUESTION]
    again = read(MESSAGES, memory, messages=history)
    assert again.call.messages == (QUESTION, reply.message, QUESTION)


@of_replies
def test_message_sent_back_to_another_session_has_equal_arguments(reply):
    _, _, body = exchanged(MESSAGES, reply)
    history = [QUESTION, {"role": "assistant", "content": body["content"]}]
    (_, message) = read(MESSAGES, SessionMemory(), messages=history).call.messages
    for call, expected in zip(message.get("tool_calls", ()), reply.tool_calls, strict=True):
        written = call["function"]["arguments"]
        assert written == expected.arguments or json.loads(written) == json.loads(expected.arguments)


@pytest.mark.parametrize("earlier", [0, 1, 3])
def test_response_events_after_keep_alives_are_numbered_without_a_gap(earlier):
    exchange = read(RESPONSES, SessionMemory(), tools=RESPONSE_TOOLS)
    text = b"".join(exchange.keep_alive(number) for number in range(earlier)).decode()
    kept = [json.loads(event.partition("data: ")[2]) for event in text.split("\n\n") if event]
    reply = Reply("Yes.", "", (), "stop", (), 9, 4)
    events = kept + list(sent_events(exchange, exchange.body(reply), earlier))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events].count("response.created") == 1


QUESTIONS = st.text("ab {}<>\n\"'é\U0001f600", min_size=1, max_size=8)
SEARCH = {"name": "search", "parameters": {"type": "object", "properties": {}}}
TOOL_LISTS: dict[str, list[Json]] = {
    CHAT: [{"type": "function", "function": SEARCH}],
    RESPONSES: [{"type": "function"} | SEARCH],
    MESSAGES: [{"name": "search", "input_schema": SEARCH["parameters"]}],
}
_renderer = functools.cache(lambda template: renderer_of(template, merges=True))


def following(path: str, body: Json, answers: list[str], question: str) -> list[Json]:
    """What a client of an API adds to its conversation: the reply, and results of its calls or a question."""
    if path == CHAT:
        message = body["choices"][0]["message"]
        names = [call["id"] for call in message.get("tool_calls") or ()]
        results = [
            {"role": "tool", "tool_call_id": i, "content": text} for i, text in zip(names, answers, strict=False)
        ]
        return [message, *(results or [{"role": "user", "content": question}])]
    if path == RESPONSES:
        names = [item["call_id"] for item in body["output"] if item["type"] == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": i, "output": text}
            for i, text in zip(names, answers, strict=False)
        ]
        return [*body["output"], *(results or [{"role": "user", "content": question}])]
    names = [block["id"] for block in body["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": i, "content": text} for i, text in zip(names, answers, strict=False)
    ]
    return [{"role": "assistant", "content": body["content"]}, {"role": "user", "content": results or question}]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("template", [pytest.param(KEEPING, id="keeping"), pytest.param(THINKING, id="thinking")])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_reply_sent_back_is_accepted_and_changes_no_token(path, template, data):
    conversation, memory = Conversation(_renderer(template), QWEN3), SessionMemory()
    history: list[Json] = [{"role": "user", "content": data.draw(QUESTIONS)}]
    tokens: tuple[int, ...] = ()
    two_calls = st.tuples(CALLS, CALLS).map("".join)
    for _ in range(3):
        field = "input" if path == RESPONSES else "messages"
        exchange = read(path, memory, tools=TOOL_LISTS[path], **{field: history})
        asked = conversation.ask(list(exchange.call.messages), exchange.call.tools)
        assert asked[1].tokens[: len(tokens)] == tokens
        written = data.draw(st.one_of(REPLIES, SPELLINGS, two_calls, st.text(max_size=9), st.just("")))
        if isinstance(written, str):  # halves of characters have no spelling
            written = written.encode("utf-8", "replace").decode().replace("<|im_", "")
        ends = data.draw(st.booleans())
        message = conversation.answer(asked, written, ends)
        calls = tuple(
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        )
        finish: Any = "tool_calls" if calls else "stop" if ends else "length"
        reply = Reply(message["content"], message.get("reasoning_content", ""), calls, finish, (), 9, 4)
        body = through_json(exchange.body(reply))
        answers = data.draw(st.lists(QUESTIONS, min_size=len(calls), max_size=len(calls)))
        history += following(path, body, answers, data.draw(QUESTIONS))
        # The other template writes earlier replies without their reasoning, which begins another segment.
        tokens = (*asked[1].tokens, *conversation.log[-1][1]) if template is KEEPING else ()
    conversation.check()
