"""Chat template and tool calls that the tests of tools share."""

import json
import string
from typing import Any

from verl_mg.models.tiny_model import character_tokenizer

# Like Qwen's template: adjacent results share a user turn, and a line break follows the end of a turn.
TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<user>' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<eos>\\n' -}}{%- endif -%}
{%- else -%}{{- '<' + m.role + '>' + m.content + '<eos>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"""


def tokenizer_with(template: str | None = TEMPLATE) -> Any:
    """Returns a tokenizer of characters with a chat template."""
    tokenizer: Any = character_tokenizer(string.printable)
    tokenizer.chat_template = template
    return tokenizer


def qwen(name: str, **arguments: Any) -> str:
    """Returns a tool call in Qwen's format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
