"""Prompts of a teacher that knows more than the student, such as the answer, from a template of the configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl_mg.data.prompts import Prompt
from verl_mg.data.rendering import RenderedPrompt, render, tokenize
from verl_mg.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIELD = re.compile(r"\{(\w+)\}")


def teacher_prompt(
    prompt: Prompt,
    template: str | None,
    tokenizer: PreTrainedTokenizerBase,
    key: str,
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """Returns the tokens of a prompt as a teacher reads it.

    The template takes the place of the prompt's text, or of its last message, which the chat template then renders.

    Args:
        prompt: the prompt of the student; UserError if it has images or misses a field of the template.
        template: text with {prompt}, {answer} and names of fields of the record in braces; None: the prompt as it
            is.
        tokenizer: tokenizer of the teacher.
        key: configuration key of the template, for errors.
        tools: schemas that a chat template describes to the model.
    """
    if prompt.images:
        raise UserError(f"{prompt.where}: {key} is for prompts without images. Leave such records out.")
    if isinstance(prompt.messages[-1]["content"], str) and is_templated(prompt):
        *context, last = prompt.messages
        text = _filled(template, prompt, last["content"], key)
        rendered = render([*context, last | {"content": text}], tokenizer, True, "", prompt.where, tools)
    else:
        rendered = RenderedPrompt(_filled(template, prompt, prompt.text, key), False, [])
    return tokenize([rendered], tokenizer)[0]


def is_templated(prompt: Prompt) -> bool:
    """Returns whether a chat template rendered a prompt; otherwise its text is its only message's."""
    return len(prompt.messages) != 1 or prompt.messages[0]["content"] != prompt.text


def _filled(template: str | None, prompt: Prompt, text: str, key: str) -> str:
    # All fields are replaced in one pass: braces in a prompt are text.
    if template is None:
        return text

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        value = {"prompt": text, "answer": prompt.answer}.get(name, prompt.record.get(name))
        if value is None:
            known = ", ".join(sorted({"prompt", "answer", *prompt.record}))
            raise UserError(f"{prompt.where}: no field {name!r} for {key}. Write one of: {known}.")
        return str(value)

    return _FIELD.sub(value_of, template)
