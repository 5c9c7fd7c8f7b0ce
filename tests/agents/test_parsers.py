"""Reasoning in replies, by where the template begins and ends it, and calls of tools in it and behind it."""

import itertools

import pytest

from tests.agents.conversations import KEEPING, chat_tokenizer
from tests.helpers.traces import needs_sglang
from verl_mg.agents.tool_calls import ReplyParser, unread_reasoning
from verl_mg.config import RolloutConfig
from verl_mg.engines.sglang.internals import reply_parsers
from verl_mg.errors import UserError
from verl_mg.models.tiny_model import character_tokenizer

pytestmark = needs_sglang

QUESTION = "<|im_start|>assistant\n"
OPENED, CLOSED = QUESTION + "<think>\n", QUESTION + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("form", ["qwen3", "qwen3-thinking", "deepseek-r1"])
@pytest.mark.parametrize(
    ("prompt", "written", "reasoning", "text"),
    [
        (QUESTION, "<think>\nso\n</think>\n\nyes", "so", "yes"),
        (QUESTION, "<think>\n\n</think>\n\nyes", "", "yes"),
        (QUESTION, "<think></think>yes", "", "yes"),
        (QUESTION, "<think>\nso", "so", ""),
        (OPENED, "so\n</think>\n\nyes", "so", "yes"),
        (OPENED, "\n</think>\n\nyes", "", "yes"),
        (OPENED, "so", "so", ""),
        (CLOSED, "\n yes\n", "", "\n yes\n"),
        (CLOSED, "<think>\nso\n</think>\n\nyes", "so", "yes"),
    ],
)
def test_parse_reasoning_where_the_prompt_or_the_reply_begins_it(form, prompt, written, reasoning, text):
    parsed = ReplyParser(chat_tokenizer(KEEPING), "qwen25", form).parse(written, (), prompt)
    assert (parsed.reasoning, parsed.text) == (reasoning, text)


def test_parse_reply_without_reasoning_leaves_its_spaces():
    parser = ReplyParser(chat_tokenizer(KEEPING), "qwen25", "qwen3")
    assert parser.parse("\n yes \n", (), QUESTION).text == "\n yes \n"


@pytest.mark.parametrize(
    ("keys", "marks", "warned"),
    [
        ({"tools": ["a:b"]}, ["</think>"], "</think>"),
        ({"agent": "a:b"}, ["[/THINK]"], "[/THINK]"),
        ({"agent": "a:b"}, ["<seed:think>"], "<seed:think>"),
        ({"tools": ["a:b"]}, [], ""),
        ({}, ["<think>"], ""),
        ({"tools": ["a:b"], "reasoning_parser": "qwen3"}, ["<think>"], ""),
    ],
)
def test_unread_reasoning_of_tools_is_a_warning_with_the_mark(keys, marks, warned):
    warning = unread_reasoning(RolloutConfig(**keys), character_tokenizer("ab", marks))
    assert warning.startswith(f"rollout.reasoning_parser: the tokenizer has {warned}," if warned else "")
    assert bool(warning) == bool(warned)


ERASE = {"type": "function", "function": {"name": "erase", "parameters": {"properties": {"path": {"type": "string"}}}}}
JSON = '{"name": "erase", "arguments": {"path": "all"}}'
TOKENIZER = chat_tokenizer(KEEPING)
# The same call in the formats of families of models.
CALLS = {
    "qwen25": f"<tool_call>\n{JSON}\n</tool_call>",
    "hermes": f"<tool_call>\n{JSON}\n</tool_call>",
    "interns1": f"<|action_start|> <|plugin|>\n{JSON}<|action_end|>",
    "mistral": f"[TOOL_CALLS] [{JSON}]",
    "llama3": '<|python_tag|>{"name": "erase", "parameters": {"path": "all"}}',
    "pythonic": '[erase(path="all")]',
    "qwen3_coder": "<tool_call>\n<function=erase>\n<parameter=path>\nall\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>erase\n<arg_key>path</arg_key>\n<arg_value>all</arg_value>\n</tool_call>",
    # Its marks have other characters in place of | and _.
    "deepseekv3": (
        '<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>erase\n```json\n{"path": "all"}\n```'
        "<|tool_call_end|><|tool_calls_end|>"
    ).translate({ord("|"): 0xFF5C, ord("_"): 0x2581}),
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.erase:0<|tool_call_argument_begin|>"
    '{"path": "all"}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax-m2": '<minimax:tool_call>\n<invoke name="erase">\n<parameter name="path">all</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
}
# Formats whose answer has marks of its own, so that plain text behind the reasoning is none.
CHANNELS = {"apertus2509", "beam", "cohere_command4", "gpt-oss", "inkling", "kimi_k3", "muse"}
sglang = reply_parsers()
REASONING = sorted(sglang.reasoning.DetectorMap.keys() - {"response_template"}) if sglang else []


def names_called(parser: ReplyParser, written: str, prompt: str = QUESTION) -> list[str]:
    return [call.name for call in parser.parse(written, [ERASE], prompt).tool_calls]


@pytest.mark.parametrize("reasoning", REASONING)
def test_parse_calls_in_the_reasoning_are_none_and_calls_behind_it_are(reasoning):
    # The two parsers work one after the other: all pairs would show no more.
    forms = CALLS if reasoning == "qwen3" else ("qwen25", "interns1", "kimi_k2")
    for form, call in ((form, CALLS[form]) for form in forms):
        parser = ReplyParser(TOKENIZER, form, reasoning)
        _, start, end = parser._reasoning_parser()
        thought = f"I could write\n{call}\nbut I will not."
        for written, prompt in [
            (f"{start}\n{thought}\n{end}\n\n4", QUESTION),
            (f"{start}{call}{end}4", QUESTION),
            (f"{start}\n{thought}", QUESTION),
            (f"{start}\n{call}", QUESTION),
            (f"\n{thought}\n{end}\n\n4", f"{QUESTION}{start}\n"),
            (thought, f"{QUESTION}{start}\n"),
            (f"{start}no{end}Or {start}{call}{end}4", QUESTION),
            (f"Well. {start}{call}{end}4", QUESTION),
        ]:
            if reasoning in CHANNELS and not written.startswith(start):
                continue  # such a template writes the mark itself, or the text is no message
            assert names_called(parser, written, prompt) == [], (form, written)
        if reasoning not in CHANNELS:
            for written in (f"{start}{thought}{end}\n\n{call}", f"{start}{end}{call}"):
                assert names_called(parser, written) == ["erase"], (form, written)


@pytest.mark.parametrize(("form", "call"), CALLS.items())
def test_parse_calls_without_reasoning_are_read(form, call):
    without = ReplyParser(chat_tokenizer(KEEPING), form)
    assert names_called(without, call) == ["erase"]
    # A reply that begins with its call has no reasoning, also where the format assumes some.
    for reasoning in ("qwen3", "glm45", "mistral"):
        parser = ReplyParser(chat_tokenizer(KEEPING), form, reasoning)
        assert names_called(parser, call) == names_called(parser, call, CLOSED) == ["erase"], reasoning


def test_parse_text_that_mentions_the_mark_of_reasoning_stays_text():
    for reasoning, written in itertools.product(
        ("qwen3", "glm45", "nemotron_3"), ("The mark is <think>.", "<b> <think")
    ):
        parsed = ReplyParser(chat_tokenizer(KEEPING), "qwen25", reasoning).parse(written, [ERASE], QUESTION)
        assert (parsed.text, parsed.reasoning) == (written, "")


def test_reply_parser_for_another_kind_of_tokenizer_raises():
    with pytest.raises(UserError, match="rollout.reasoning_parser=response_template: .* Write the parser of the model"):
        ReplyParser(chat_tokenizer(KEEPING), "qwen25", "response_template")
