"""Variables of chat templates, `rollout.chat_template_options`, as a part of the templates themselves.

{enable_thinking: False}  -->  {%- set enable_thinking = False -%}{%- for message in messages -%}...

So they hold wherever a template is applied: to prompts, demonstrations, pairs, conversations of agents and results of
tools.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from verl_mg.data.prompts import Prompt
from verl_mg.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_mg.data.image_processor import ImageProcessor

KEY = "rollout.chat_template_options"
# What a caller says of each conversation: a template reads it, but an option would replace it.
OF_CALLS = ("messages", "tools", "documents", "add_generation_prompt")


def set_template_options(
    options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, processor: ImageProcessor | None = None
) -> None:
    """Sets variables in the chat templates of a model; UserError for one that no template reads."""
    if not options:
        return
    # A processor has a chat template in addition to that of its tokenizer.
    owners = [owner for owner in (tokenizer, processor and processor.templated) if owner and owner.chat_template]
    templates = [template for owner in owners for template in _by_name(owner.chat_template).values()]
    if not templates:
        raise UserError(f"{KEY}: the tokenizer of model.path has no chat template. Leave it out.")
    known = {name for template in templates for name in _variables(template) if not name.endswith("_token")}
    if unknown := [name for name in options if name not in known.difference(OF_CALLS)]:
        names = ", ".join(sorted(known.difference(OF_CALLS))) or "nothing that an option could set"
        raise UserError(f"{KEY}.{unknown[0]}: the chat template of model.path does not read it. It reads {names}.")
    for name, value in options.items():
        if not _is_literal(value):
            raise UserError(
                f"{KEY}.{name}: {value!r} has another type than templates can have. Write a text, true, false, null, "
                "a finite number, or lists and mappings of them."
            )
    # Jinja reads these values as Python writes them.
    begin = "".join(f"{{%- set {name} = {value!r} -%}}" for name, value in options.items())
    for owner in owners:
        changed = {name: begin + text for name, text in _by_name(owner.chat_template).items()}
        owner.chat_template = changed if isinstance(owner.chat_template, dict) else changed[""]


def check_options_are_used(prompts: Iterable[Prompt]) -> None:
    """Raises UserError where no prompt of a job with options and without agents and tools is written by a template."""
    if not any(prompt.templated for prompt in prompts):
        raise UserError(f"{KEY}: no prompt is written by the template. Set data.chat_template=true, or leave it out.")


def _is_literal(value: Any) -> bool:
    """Returns whether what Python writes for a value is the value in Jinja."""
    if isinstance(value, dict):
        return all(map(_is_literal, (*value, *value.values())))
    if type(value) is list:
        return all(map(_is_literal, value))
    return value is None or type(value) in (str, bool, int) or (type(value) is float and math.isfinite(value))


def _by_name(template: Any) -> dict[str, str]:
    return template if isinstance(template, dict) else {"": template}


def _variables(template: str) -> set[str]:
    """Returns the names that a template reads from outside."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment  # it knows the tags of transformers
    return meta.find_undeclared_variables(environment.parse(template)) - environment.globals.keys()
