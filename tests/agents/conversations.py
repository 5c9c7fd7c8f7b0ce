"""Tokenizers with chat templates that drop reasoning, render tool calls again, or keep everything."""

import string
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from verl_mg.agents.renderer import ConversationRenderer
from verl_mg.data.template_options import set_template_options
from verl_mg.models.tiny_model import character_tokenizer

MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
THINKING = """\
{%- set state = namespace(last_question=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set state.last_question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set thought = message.reasoning_content or '' -%}
{%- set text = message.content or '' -%}
{%- if not thought and '</think>' in text -%}
{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > state.last_question and (loop.last or thought) -%}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n') -}}
{%- else -%}{{- text -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""Reasoning as in Qwen3's template: that of replies before the last question of the user is dropped, the last reply has
it even if it is empty, and results of tools are part of a user's turn."""

KEEPING = """\
{%- if tools -%}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.reasoning_content -%}{{- '<think>' + message.reasoning_content + '</think>' -}}{%- endif -%}
{{- (message.content or '') | trim -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""Everything stays as it was, but for spaces around texts and in calls."""


PEERS = Path(sys.prefix) / "peers" / "trl" / "chat_templates"
"""Templates of models, which TRL has; tools/install/peers.sh installs it."""


def template_of(model: str) -> str:
    """The template of a model, such as qwen3; the test is skipped where TRL is not installed."""
    if not PEERS.exists():
        pytest.skip("TRL, which has the templates of models, is installed by tools/install/peers.sh")
    return (PEERS / f"{model}.jinja").read_text()


def chat_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of characters, and of the marks of a template."""
    return character_tokenizer(string.printable, MARKS, template)


def merging_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and merges of them, so that a text has many spellings and a character many tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([THINKING, KEEPING, "ab  ba\n\n\n é {}} <> the answer " * 9], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False
    )
    fast.add_tokens(MARKS)
    return fast


def renderer_of(template: str, merges: bool = False, **options: Any) -> ConversationRenderer:
    """A renderer whose replies end with `<|im_end|>`; `options` are those of the template."""
    tokenizer = merging_tokenizer(template) if merges else chat_tokenizer(template)
    set_template_options(options, tokenizer)
    return ConversationRenderer(tokenizer, tokenizer.convert_tokens_to_ids(["<|im_end|>"]))
