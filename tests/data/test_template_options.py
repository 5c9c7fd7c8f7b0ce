"""Variables of chat templates, wherever a template is applied."""

import copy
import math
import re
from types import SimpleNamespace

import pytest

from tests.agents.conversations import chat_tokenizer
from verl_mg.data.prompts import Prompt
from verl_mg.data.template_options import check_options_are_used, set_template_options
from verl_mg.errors import UserError

# Read in a macro too, and in a branch that is not taken without the variable.
READING = """\
{%- macro said(message) -%}{{- message.role + ':' + message.content + (mood | default('')) -}}{%- endmacro -%}
{%- for message in messages -%}{{- said(message) -}}{%- endfor -%}
{%- if thinking is defined and not thinking -%}{{- '()' -}}{%- endif -%}{{- (effort or {}) | tojson -}}
{%- if add_generation_prompt -%}{{- bos_token or '' -}}{%- endif -%}"""
HELLO = [{"role": "user", "content": "a"}]


def rendered(template, options, **variables):
    tokenizer = chat_tokenizer(template)
    set_template_options(options, tokenizer)
    return tokenizer.apply_chat_template(HELLO, tokenize=False, **variables)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"thinking": False},
        {"thinking": None, "effort": {"low": [1, 2.5, None, True]}},
        {"mood": 'it\'s "so" \\n\n {{ x }} %} é \U0001f600', "effort": "high"},
    ],
)
def test_set_template_options_equals_variables_of_the_call(options):
    expected = chat_tokenizer(READING).apply_chat_template(HELLO, tokenize=False, **options)
    assert rendered(READING, options) == expected
    assert rendered({"default": READING}, options) == expected


def test_set_template_options_hold_for_copies_and_processors():
    tokenizer, processor = chat_tokenizer(READING), SimpleNamespace(templated=SimpleNamespace(chat_template=READING))
    set_template_options({"thinking": False}, tokenizer, processor)
    again = copy.deepcopy(tokenizer)
    assert again.apply_chat_template(HELLO, tokenize=False) == "user:a(){}"
    assert processor.templated.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (
            READING,
            {"thinkng": False},
            "thinkng: .* does not read it. It reads effort, mood, thinking.",
        ),
        (READING, {"messages": []}, "messages: the chat template of model.path does not read it"),
        (READING, {"add_generation_prompt": False}, "add_generation_prompt: the chat template"),
        ("{{- messages[0].content -}}", {"thinking": True}, "It reads nothing that an option could set."),
        (READING, {"mood": math.inf}, "mood: inf has another type .* lists and mappings of them."),
        (READING, {"effort": {"low": [math.nan]}}, "effort: {'low': .nan.} has another .* and mappings of them."),
        (READING, {"mood": {"a"}}, "mood: {'a'} has another type than .* lists and mappings of them."),
        (None, {"thinking": True}, "has no chat template. Leave it out."),
    ],
)
def test_set_template_options_that_no_template_reads_raise(template, options, message):
    with pytest.raises(UserError, match=rf"^rollout.chat_template_options.*{re.escape(message[-20:])}") as caught:
        rendered(template, options)
    assert re.search(message, str(caught.value))


def test_check_options_are_used_needs_a_prompt_that_a_template_has_written():
    written = Prompt(0, (1,), "a", None, {}, messages=HELLO, templated=True)  # by a template without a role
    plain = Prompt(1, (1,), "a", None, {}, messages=HELLO)
    check_options_are_used([plain, written])
    with pytest.raises(UserError, match="no prompt is written by the template. Set data.chat_template=true"):
        check_options_are_used([plain, plain])
