"""From a prompt field to text, and from texts to tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_mg.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Rendered(NamedTuple):
    """A prompt's text; `templated` where a chat template wrote it, special tokens and all."""

    text: str
    templated: bool


def render(
    value: Any,
    tokenizer: "PreTrainedTokenizerBase",
    chat_template: bool,
    instruction: str,
    place: str,
    tools: Sequence[dict[str, Any]] = (),
) -> Rendered:
    """The text of a prompt field: a string, or a list of messages `{"role": ..., "content": ...}`.

    Args:
        chat_template: make a string the one user message of a conversation.
        instruction: appended to a string.
        place: `file:line`, for errors.
        tools: schemas of the tools that the template is to describe.

    Raises:
        UserError: the value is neither, or the tokenizer's template is missing or refuses it.
    """
    if isinstance(value, str) and not chat_template:
        return Rendered(value + instruction, templated=False)
    messages = [{"role": "user", "content": value + instruction}] if isinstance(value, str) else value
    return Rendered(_conversation(messages, tokenizer, place, tools), templated=True)


def tokenise(rendered: Sequence[Rendered], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """The token ids of each text, one ragged row a text; fast tokenizers take all of them at once."""
    rows: list[list[int]] = [[] for _ in rendered]
    for templated in (False, True):
        chosen = [i for i, item in enumerate(rendered) if item.templated is templated]
        if chosen:
            # A template writes the special tokens itself; the tokenizer would add them a second time.
            ids = tokenizer([rendered[i].text for i in chosen], add_special_tokens=not templated)["input_ids"]
            for i, row in zip(chosen, ids, strict=True):
                rows[i] = row
    return rows


def _conversation(
    messages: Any, tokenizer: "PreTrainedTokenizerBase", place: str, tools: Sequence[dict[str, Any]]
) -> str:
    if not is_conversation(messages):
        raise UserError(
            f"{place}: a prompt is a string or a list of messages "
            '[{"role": "user", "content": "..."}], ' + f"not {messages!r:.60}"
        )
    if tokenizer.chat_template is None:
        raise UserError(
            f"{place}: the tokenizer has no chat template; take the tokenizer of an instruction-tuned model, "
            "or write prompts as strings and set data.chat_template=false"
        )
    try:
        # As text: with tokenize=True the type returned changes with the release of transformers.
        described = {"tools": list(tools)} if tools else {}
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **described))
    except Exception as error:  # a template is a program: it raises what it likes
        raise UserError(
            f"{place}: the tokenizer's chat template refuses the prompt ({error}); mend its roles or contents"
        ) from error


def is_conversation(value: Any) -> bool:
    """Whether a field is a list of messages, at least one."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and {"role", "content"} <= message.keys()
