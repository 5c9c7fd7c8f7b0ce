"""Reasoning in replies, by where the template begins and ends it."""

import pytest

from tests.agents.conversations import KEEPING, chat_tokenizer
from verl_mg.agents.tool_calls import ReplyParser

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
