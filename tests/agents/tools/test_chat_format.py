"""Tool calls parsed by SGLang, and results formatted by a chat template."""

import json
import sys

import pytest

from tests.agents.tools.scripted import TEMPLATE, qwen, tokenizer_with
from tests.helpers.traces import needs_sglang
from verl_mg.agents.tool_calls import MALFORMED, ToolCall
from verl_mg.agents.tools.builtin import calculator
from verl_mg.agents.tools.chat_format import ToolCallFormat, ToolResult
from verl_mg.agents.tools.tool import Tool
from verl_mg.errors import UserError

pytestmark = needs_sglang

TOOLS = [Tool.from_function(calculator)]


def calls_in(text: str, tool_call_parser: str = "qwen25") -> list[ToolCall]:
    tokens = tokenizer_with()(text, add_special_tokens=False)["input_ids"]
    return ToolCallFormat(tokenizer_with(), TOOLS, tool_call_parser).calls(tokens)


ONE, TWO = qwen("calculator", expression="1"), qwen("calculator", expression="2")


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("qwen25", "the answer is 42 {} <tool>", []),
        (
            "qwen25",
            f"think\n{ONE}\n{TWO}",
            [("calculator", {"expression": "1"}), ("calculator", {"expression": "2"})],
        ),
        ("qwen25", qwen("oracle", question="?"), [("oracle", {"question": "?"})]),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"n": "3"}}', [("add", {"n": "3"})]),
    ],
)
def test_calls_are_returned_in_order_those_of_unknown_tools_too(form, text, calls):
    assert [(call.name, json.loads(call.arguments)) for call in calls_in(text, form)] == calls


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "calculator", "arg\n</tool_call>',
        '<tool_call>\n{"name": "calculator"',
        "<tool_call>\n7\n</tool_call>",
        "<tool_call>\n[[]]\n</tool_call>",
    ],
)
def test_calls_malformed_text_returns_malformed(text):
    assert calls_in(text) == [MALFORMED]
    good = qwen("calculator", expression="1")
    assert calls_in(f"{good}\n{text}")[-1] is MALFORMED


def observed(last: str, results: list[ToolResult], template: str | None = TEMPLATE) -> str:
    tokenizer = tokenizer_with(template)
    tokens = ToolCallFormat(tokenizer, TOOLS, "qwen25").observation(tokenizer.convert_tokens_to_ids(last), results)
    return str(tokenizer.decode(tokens))


def test_observation_uses_the_template_without_the_end_token():
    one, two = ToolResult("calculator", "42"), ToolResult("calculator", "error: é")
    worded = "\n<user>\n<tool_response>\n42\n</tool_response><eos>\n<assistant>"
    assert observed("<eos>", [one]) == worded
    assert observed("<eos>", [one, ToolResult("", "7")]) == worded.replace(
        "42\n</tool_response>", "42\n</tool_response>\n<tool_response>\n7\n</tool_response>"
    )
    assert observed("<pad>", [one]) == "<eos>" + worded
    assert "error: " in observed("<eos>", [two])


def test_observation_equals_the_tokens_of_the_whole_conversation():
    tokenizer = tokenizer_with()
    prompt = [{"role": "user", "content": "6*7?"}]
    written = qwen("calculator", expression="6*7")
    tokens = tokenizer(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))["input_ids"]
    tokens += [*tokenizer(written)["input_ids"], tokenizer.eos_token_id]
    tokens += ToolCallFormat(tokenizer, TOOLS, "qwen25").observation(tokens[-1], [ToolResult("calculator", "42")])
    messages = [*prompt, {"role": "assistant", "content": written}, {"role": "tool", "content": "42"}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokens == tokenizer(whole)["input_ids"]


def test_observation_without_template_uses_line_breaks():
    assert observed("<eos>", [ToolResult("a", "1"), ToolResult("b", "2")], template=None) == "\n1\n2\n"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{- raise_exception('no role tool') -}}", "rejects the role tool .*no role tool"),
        ("{%- for m in messages if m.role == 'user' -%}{{- m.content -}}{%- endfor -%}", "omits tool messages"),
    ],
)
def test_tool_call_format_template_without_tools_raises(template, reason):
    with pytest.raises(UserError, match=reason):
        ToolCallFormat(tokenizer_with(template), TOOLS, "qwen25")


def test_tool_call_format_unknown_parser_raises():
    with pytest.raises(UserError, match=r"rollout.tool_call_parser=qwen35: .*qwen25"):
        ToolCallFormat(tokenizer_with(), TOOLS, "qwen35")


def test_tool_call_format_without_sglang_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang.srt.function_call.function_call_parser", None)
    with pytest.raises(UserError, match=r"rollout.tool_call_parser=qwen25: .*tools/install/sglang_cpu.sh"):
        ToolCallFormat(tokenizer_with(), TOOLS, "qwen25")
