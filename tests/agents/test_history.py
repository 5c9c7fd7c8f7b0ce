"""Exact tokens of conversations, for templates that rewrite history and for those that keep it."""

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agents.conversations import (
    KEEPING,
    QWEN3,
    REPLIES,
    SPELLINGS,
    TEXTS,
    THINKING,
    TOOL,
    Conversation,
    chat_tokenizer,
    renderer_of,
    template_of,
)
from verl_mg.agents.call import RequestError
from verl_mg.agents.renderer import ConversationRenderer
from verl_mg.agents.tool_calls import ReplyParser

RENDERERS = {"thinking": renderer_of(THINKING), "keeping": renderer_of(KEEPING)}
PARSERS = {"thinking": QWEN3, "keeping": ReplyParser(chat_tokenizer(KEEPING), "qwen25")}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


@functools.cache
def renderer(name: str) -> ConversationRenderer:
    template, _, option = name.partition(" without ")
    options = {"enable_thinking": False} if option else {}
    return renderer_of(THINKING if template == "merges" else template_of(template), merges=True, **options)


def conversation_of(name: str) -> Conversation:
    """A conversation by the name of a case."""
    if name in RENDERERS:
        return Conversation(RENDERERS[name], PARSERS[name])
    return Conversation(renderer(name), QWEN3)


@pytest.mark.parametrize(
    "case",
    [
        *("thinking", "keeping", "merges", "qwen3", "qwen3_5_think"),
        *(pytest.param(case, marks=pytest.mark.nightly) for case in ("qwen3 without thinking", "qwen2_5")),
    ],
)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_context_random_conversations_train_each_token_once(case, data):
    conversation = conversation_of(case)
    replies = REPLIES if case in RENDERERS else st.one_of(REPLIES, SPELLINGS)
    histories: list[list[dict[str, Any]]] = [[user("hello")]]
    agents = st.sampled_from(data.draw(st.sampled_from([[""], [""], ["white", "black"]])))
    tools = data.draw(st.sampled_from([(TOOL,), (TOOL,), ()]))
    for _ in range(data.draw(st.integers(1, 8))):
        tools = data.draw(st.sampled_from([tools, tools, tools, tools, (), (TOOL,)]))
        messages = list(data.draw(st.sampled_from([*histories[:-4:-1], *histories])))
        count = data.draw(st.sampled_from([1, 1, 1, 2]))
        asked = [conversation.ask(messages, tools, data.draw(agents)) for _ in range(count)]
        for each in asked:  # requests at the same time
            ends, trained = (data.draw(st.sampled_from([True, True, False])) for _ in range(2))
            reply = conversation.answer(each, data.draw(replies), ends, trained)
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


def test_context_reply_as_rendered_continues_its_segment():
    conversation = conversation_of("keeping")
    messages = [user("one")]
    for number in range(4):
        asked = conversation.ask(messages)
        assert asked[1].kept == (0 if number == 0 else len(conversation.history.segments()[0].tokens))
        assert conversation.renderer.decode(asked[1].tokens) == conversation.renderer.render(messages, (), True)
        messages = [*messages, conversation.answer(asked, f"reply {number}"), user("next")]
    conversation.check()
    assert len(conversation.history.segments()) == 1


def test_context_call_rendered_otherwise_keeps_the_generated_tokens():
    conversation = conversation_of("keeping")
    messages = [user("one")]
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


def test_context_question_after_reasoning_begins_a_segment_without_it():
    conversation = conversation_of("thinking")
    messages = [user("one")]
    asked = conversation.ask(messages)
    reply = conversation.answer(asked, "<think>\nsecret\n</think>\n\nfirst")
    assert reply == {"role": "assistant", "content": "first", "reasoning_content": "secret"}
    called = conversation.ask([*messages, {"role": "assistant", "content": "first"}, user("two")])
    text = conversation.renderer.decode(called[1].tokens)
    assert "secret" not in text and "first" in text
    assert called[1].kept == len(asked[1].tokens), "the tokens in front of the reply are kept"
    conversation.answer(called, "second")
    conversation.check()
    assert [(s.prefix_of, s.prefix_length) for s in conversation.history.segments()] == [(None, 0), (0, called[1].kept)]


def test_context_tool_result_after_reasoning_keeps_it_though_the_agent_does_not_send_it():
    conversation = conversation_of("thinking")
    messages = [user("one")]
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


def test_context_of_twins_that_differ_in_reasoning_continues_the_one_that_is_sent_back():
    conversation = Conversation(RENDERERS["keeping"], PARSERS["thinking"])
    messages = [user("one")]
    both = [conversation.ask(messages), conversation.ask(messages)]
    replies = [conversation.answer(asked, f"<think>thought {number}</think> yes") for number, asked in enumerate(both)]
    for number, reply in enumerate(replies):
        _, context = conversation.ask([*messages, reply, user("two")])
        text = conversation.renderer.decode(context.tokens)
        assert f"thought {number}</think> yes" in text and f"thought {1 - number}" not in text
    edited = {**replies[0], "reasoning_content": "other thought"}
    _, context = conversation.ask([*messages, edited, user("two")])
    text = conversation.renderer.decode(context.tokens)
    assert "<think>other thought</think>yes" in text and "thought 0" not in text


def test_requests_for_the_same_reply_at_once_share_their_prompt():
    conversation = conversation_of("keeping")
    asked = [conversation.ask([user("one")]) for _ in range(3)]
    for number, each in enumerate(asked):
        conversation.answer(each, f"reply {number}")
    conversation.check()
    length = len(asked[0][1].tokens)
    prefixes = [(s.prefix_of, s.prefix_length) for s in conversation.history.segments()]
    # The first letters of the replies are the same, but no request knew them.
    assert prefixes == [(None, 0), (0, length), (1, length)]


def test_context_of_two_agents_continues_the_segment_of_each_without_the_reasoning_of_the_other():
    conversation = Conversation(RENDERERS["keeping"], PARSERS["thinking"])
    messages, prompts = [user("one")], []
    for number in range(3):
        for agent in ("white", "black"):
            asked = conversation.ask(messages, agent=agent)
            reply = conversation.answer(asked, f"<think>thought of {agent}</think> move {number}")
            messages += [{"role": "assistant", "content": reply["content"]}, user("your move")]
            prompts.append(asked[1])
    conversation.check()
    white, black = conversation.history.segments()
    assert (white.agent, black.agent, black.prefix_of) == ("white", "black", 0)
    assert black.prefix_length == len(prompts[0].tokens)
    for segment, other in ((white, "black"), (black, "white")):
        text = conversation.renderer.decode(segment.tokens)
        assert text.count("thought") == 3 and other not in text and text.count("move 1") == 2


def test_context_template_that_rewrites_the_prompt_itself_shares_what_is_in_front():
    conversation = conversation_of("qwen3 without thinking")
    messages: list[dict[str, Any]] = [user("one")]
    new: list[int] = []
    for number in range(4):
        asked = conversation.ask(messages)
        new.append(len(asked[1].new_messages))
        messages += [conversation.answer(asked, f"reply {number}"), user("next")]
    conversation.check()
    segments = conversation.history.segments()
    assert [s.prefix_of for s in segments] == [None, 0, 1, 2] and new == [1, 1, 1, 1]
    for number, segment in enumerate(segments[1:], 1):
        shared = conversation.renderer.decode(segment.tokens[: segment.prefix_length])
        assert shared.endswith("<|im_start|>assistant\n") and shared.count("assistant") == number


def test_context_text_of_an_end_token_in_a_message_is_no_end_of_a_reply():
    tokenizer = chat_tokenizer(KEEPING)
    stops = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<eos>"])
    conversation = Conversation(ConversationRenderer(tokenizer, stops), PARSERS["keeping"])
    messages = [user("what is <eos> ?")]
    reply = conversation.answer(conversation.ask(messages), "the end", end="<eos>")
    _, context = conversation.ask([*messages, reply, user("two")])
    text = conversation.renderer.decode(context.tokens)
    given = "what is <eos> ?<|im_end|>\n<|im_start|>assistant\nthe end<eos><|im_end|>\n"
    following = "<|im_start|>user\ntwo"
    assert text == f"<|im_start|>user\n{given}{following}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("arguments", ['{"a": ' * 100_000, "[" * 100_000])
def test_context_arguments_of_any_depth_are_a_text(arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    asked = conversation_of("keeping").ask(
        [
            user("one"),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ]
    )
    assert arguments in asked[1].rendered


def test_context_truncated_reply_gets_its_end():
    conversation = conversation_of("keeping")
    messages = [user("one")]
    reply = conversation.answer(conversation.ask(messages), " cut of ", ends=False)
    _, context = conversation.ask([*messages, reply, user("two")])
    text = conversation.renderer.decode(context.tokens)
    assert text.endswith("assistant\n cut of <|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{- raise_exception('no such role') -}}", r"messages: the chat template .* \(no such role\)"),
        ("{%- if not messages -%}x{%- endif -%}", r"messages: the chat template makes no text"),
    ],
)
def test_context_template_without_a_text_raises_an_error_of_the_request(template, error):
    with pytest.raises(RequestError, match=error):
        Conversation(renderer_of(template), PARSERS["keeping"]).ask([user("one")])
