"""Conversations as text, by templates of models that their owners have written."""

from typing import Any

import pytest

from tests.agents.conversations import KEEPING, TOOL, chat_tokenizer, renderer_of, template_of
from verl_mg.agents.call import RequestError
from verl_mg.agents.renderer import ConversationRenderer


def called(arguments: str) -> list[dict[str, Any]]:
    """A conversation with a tool call and its result."""
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": "3"},
    ]


@pytest.mark.parametrize(
    ("model", "written"),
    [
        ("qwen2_5", '{"name": "add", "arguments": {"a": 1, "b": "x"}}'),
        ("qwen3", '{"name": "add", "arguments": {"a": 1, "b": "x"}}'),
        ("llama3_1", '{"name": "add", "parameters": {"a": 1, "b": "x"}}'),
        ("qwen3_5_think", "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>"),
        ("glm4moe", "<arg_key>a</arg_key>\n<arg_value>1</arg_value>"),
        ("deepseekv3", '```json\n{"a": 1, "b": "x"}\n```'),
    ],
)
def test_render_tool_call_as_the_model_writes_it(model, written):
    text = renderer_of(template_of(model)).render(called('{"a": 1, "b": "x"}'), (TOOL,), for_reply=True)
    assert written in text


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", "[" * 100_000])
def test_render_arguments_that_are_no_object_as_they_are(arguments):
    assert f'"arguments": {arguments}' in renderer_of(KEEPING).render(called(arguments), (), for_reply=True)


def test_render_rejected_conversation_reports_the_reason_for_arguments_as_values():
    template = "{{- raise_exception('with ' + ('text' if messages[1].tool_calls[0].function.arguments is string "
    with pytest.raises(RequestError, match="with values"):
        renderer_of(template + "else 'values')) -}}").render(called("{}"), (), for_reply=True)


def test_render_system_message_that_the_template_takes_at_the_beginning_alone_as_a_user_s():
    template = (
        "{%- for m in messages -%}{%- if m.role == 'system' and not loop.first -%}{{- raise_exception('late') -}}"
        "{%- endif -%}{{- '<' + m.role + '>' + m.content -}}{%- endfor -%}"
    )
    roles = ("system", "user", "system")
    messages = [{"role": role, "content": role[0]} for role in roles]
    assert renderer_of(template).render(messages, (), for_reply=True) == "<system>s<user>u<user>s"
    assert renderer_of(KEEPING).render(messages, (), for_reply=False).count("system\ns") == 2


def test_after_reply_is_what_the_template_puts_behind_it():
    tokenizer = chat_tokenizer(KEEPING)
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<eos>"])
    renderer = ConversationRenderer(tokenizer, [end, eos])
    assert renderer.after_reply("reply<|im_end|>\n", end) == "\n"
    assert renderer.after_reply("reply<|im_end|>\n", eos) == "<|im_end|>\n"
    assert renderer.after_reply("reply\n", end) == ""
