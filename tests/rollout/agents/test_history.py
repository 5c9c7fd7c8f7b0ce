"""Exact tokens of conversations, for templates that rewrite history and for those that keep it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.agents.conversations import KEEPING, THINKING, chat_tokenizer, renderer_of
from verl_mg.rollout.agents.call import Call, RequestError
from verl_mg.rollout.agents.history import Context, ConversationHistory
from verl_mg.rollout.agents.parsers import ReplyParser
from verl_mg.rollout.agents.renderer import ConversationRenderer
from verl_mg.rollout.engine import Sample
from verl_mg.rollout.trajectory import NOT_GENERATED

RENDERERS = {"thinking": renderer_of(THINKING), "keeping": renderer_of(KEEPING)}
PARSERS = {
    name: ReplyParser(chat_tokenizer(template), "qwen25", "qwen3" if name == "thinking" else None)
    for name, template in (("thinking", THINKING), ("keeping", KEEPING))
}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
END = RENDERERS["thinking"].tokens("<|im_end|>")


@dataclass
class Conversation:
    """A session with the log of what an engine was given and has generated."""

    renderer: ConversationRenderer
    parser: ReplyParser
    log: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = ConversationHistory(self.renderer)

    def ask(self, messages: list[dict[str, Any]], tools: tuple[Any, ...] = ()) -> tuple[Call, Context]:
        call = Call(tuple(messages), tools)
        return call, self.history.context(call)

    def answer(self, asked: tuple[Call, Context], text: str, ends: bool = True, trained: bool = True) -> dict[str, Any]:
        """Adds a reply, whose policy version is its number, and returns it as a message."""
        call, context = asked
        tokens = (*self.renderer.tokens(text), *(END if ends else ())) or END
        number = len(self.log)
        self.log.append((context.tokens, tokens if trained else ()))
        sample = Sample(
            0, tokens, (-0.5 - number,) * len(tokens), (number,) * len(tokens), "stop" if ends else "length"
        )
        parsed = self.parser.parse(text, call.tools)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.text}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in parsed.tool_calls
            ]
        self.history.add(call, context, sample, message, trained)
        return message

    def check(self) -> None:
        """Each generated token is trained once, behind exactly the tokens that the engine was given."""
        segments = self.history.segments()
        seen: dict[int, int] = {}
        for segment in segments:
            assert len(segment.tokens) == len(segment.logprobs) == len(segment.policy_versions)
            for version in dict.fromkeys(segment.policy_versions):
                if version == NOT_GENERATED:
                    continue
                positions = [i for i, v in enumerate(segment.policy_versions) if v == version]
                context, generated = self.log[version]
                assert positions == list(range(positions[0], positions[0] + len(generated)))
                assert segment.tokens[: positions[0]] == context
                assert tuple(segment.tokens[i] for i in positions) == generated
                assert {segment.logprobs[i] for i in positions} == {-0.5 - version}
                seen[version] = seen.get(version, 0) + 1
            assert all(
                logprob == 0.0
                for logprob, version in zip(segment.logprobs, segment.policy_versions, strict=True)
                if version == NOT_GENERATED
            )
            if segment.prefix_of is not None:
                source = segments[segment.prefix_of]
                assert source.tokens[: segment.prefix_length] == segment.tokens[: segment.prefix_length]
                assert set(segment.policy_versions[: segment.prefix_length]) <= {NOT_GENERATED}
        assert seen == {number: 1 for number, (_, generated) in enumerate(self.log) if generated}


TEXTS = st.text("ab {}<>\n\"'é", max_size=12)
REPLIES = st.one_of(
    TEXTS,
    TEXTS.map(lambda text: f"<think>\n{text}\n</think>\n\nthe answer"),
    st.tuples(TEXTS, TEXTS).map(lambda pair: f"<think>{pair[0]}</think>{pair[1]}"),
    st.sampled_from(
        [
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
            '<tool_call>{"arguments":{"a":1,"b": [2]},"name":"add"}</tool_call>',
            '<think>\nso\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
            "<tool_call>\nnot a call\n</tool_call>",
            "<think>\nunfinished",
        ]
    ),
)


@pytest.mark.parametrize("template", RENDERERS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_context_random_conversations_train_each_token_once(template: str, data: st.DataObject) -> None:
    conversation = Conversation(RENDERERS[template], PARSERS[template])
    histories: list[list[dict[str, Any]]] = [[{"role": "user", "content": "hello"}]]
    tools = data.draw(st.sampled_from([(), (TOOL,)]))
    for _ in range(data.draw(st.integers(1, 8))):
        messages = list(data.draw(st.sampled_from(histories)))
        asked = [conversation.ask(messages, tools) for _ in range(data.draw(st.sampled_from([1, 1, 1, 2])))]
        for each in asked:  # requests at the same time
            ends, trained = (
                data.draw(st.sampled_from([True, True, False])),
                data.draw(st.sampled_from([True, True, False])),
            )
            reply = conversation.answer(each, data.draw(REPLIES), ends, trained)
            if data.draw(st.booleans()):  # as clients of OpenAI send it back
                reply = {key: value for key, value in reply.items() if key != "reasoning_content"}
            if data.draw(st.integers(0, 5)) == 0:
                reply = {**reply, "content": data.draw(TEXTS)}
            following = [*messages, reply]
            for call in reply.get("tool_calls", ()):
                following.append({"role": "tool", "tool_call_id": call["id"], "content": data.draw(TEXTS)})
            if following[-1] is reply or data.draw(st.booleans()):
                following.append({"role": "user", "content": data.draw(TEXTS)})
            histories.append(following)
    conversation.check()


def test_context_reply_as_rendered_continues_its_segment() -> None:
    conversation = Conversation(RENDERERS["keeping"], PARSERS["keeping"])
    messages = [{"role": "user", "content": "one"}]
    for number in range(4):
        asked = conversation.ask(messages)
        assert asked[1].kept == (0 if number == 0 else len(conversation.history.segments()[0].tokens))
        assert conversation.renderer.decode(asked[1].tokens) == conversation.renderer.render(messages, (), True)
        messages = [*messages, conversation.answer(asked, f"reply {number}"), {"role": "user", "content": "next"}]
    conversation.check()
    assert len(conversation.history.segments()) == 1


def test_context_call_rendered_otherwise_keeps_the_generated_tokens() -> None:
    conversation = Conversation(RENDERERS["keeping"], PARSERS["keeping"])
    messages = [{"role": "user", "content": "one"}]
    asked = conversation.ask(messages, (TOOL,))
    written = ' <tool_call>\n{"arguments":{"a" :1},   "name":"add"}\n</tool_call> '
    reply = conversation.answer(asked, written)
    assert reply["tool_calls"], "the call has another form than the template's"
    messages += [reply, {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "2"}]
    call, context = conversation.ask(messages, (TOOL,))
    text = conversation.renderer.decode(context.tokens)
    assert written in text
    assert text.endswith("<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n")
    conversation.answer((call, context), "done")
    conversation.check()
    assert len(conversation.history.segments()) == 1


def test_context_question_after_reasoning_begins_a_segment_without_it() -> None:
    conversation = Conversation(RENDERERS["thinking"], PARSERS["thinking"])
    messages = [{"role": "user", "content": "one"}]
    asked = conversation.ask(messages)
    reply = conversation.answer(asked, "<think>\nsecret\n</think>\n\nfirst")
    assert reply == {"role": "assistant", "content": "first", "reasoning_content": "secret"}
    called = conversation.ask(
        [*messages, {"role": "assistant", "content": "first"}, {"role": "user", "content": "two"}]
    )
    text = conversation.renderer.decode(called[1].tokens)
    assert "secret" not in text and "first" in text
    assert called[1].kept == len(asked[1].tokens), "the tokens in front of the reply are kept"
    conversation.answer(called, "second")
    conversation.check()
    assert [(s.prefix_of, s.prefix_length) for s in conversation.history.segments()] == [(None, 0), (0, called[1].kept)]


def test_context_tool_result_after_reasoning_keeps_it_though_the_agent_does_not_send_it() -> None:
    conversation = Conversation(RENDERERS["thinking"], PARSERS["thinking"])
    messages = [{"role": "user", "content": "one"}]
    asked = conversation.ask(messages, (TOOL,))
    written = '<think>\nI add\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    reply = conversation.answer(asked, written)
    sent = {key: value for key, value in reply.items() if key != "reasoning_content"}
    result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "2"}
    called = conversation.ask([*messages, sent, result], (TOOL,))
    assert written in conversation.renderer.decode(called[1].tokens)
    conversation.answer(called, "<think>\n\n</think>\n\n2")
    conversation.check()
    assert len(conversation.history.segments()) == 1


def test_context_truncated_reply_gets_its_end() -> None:
    conversation = Conversation(RENDERERS["keeping"], PARSERS["keeping"])
    messages = [{"role": "user", "content": "one"}]
    reply = conversation.answer(conversation.ask(messages), " cut of ", ends=False)
    _, context = conversation.ask([*messages, reply, {"role": "user", "content": "two"}])
    text = conversation.renderer.decode(context.tokens)
    assert text.endswith("assistant\n cut of <|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")


def test_context_template_that_rejects_a_role_raises_an_error_of_the_request() -> None:
    template = "{{- raise_exception('no such role') -}}"
    conversation = Conversation(renderer_of(template), PARSERS["keeping"])
    with pytest.raises(RequestError, match=r"messages: the chat template .* \(no such role\)"):
        conversation.ask([{"role": "user", "content": "one"}])
