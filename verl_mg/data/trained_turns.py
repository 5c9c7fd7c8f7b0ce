"""Conversations as training rows: the turns of the assistant that are learned, each in the context it is written in.

user "2+3?", assistant "5", user "and 1?", assistant "6" with loss_on=all, and a template that keeps earlier
turns:

tokens   <user> 2+3? <assistant> 5 <end> <user> and 1? <assistant> 6 <end>      one TrainedRow
mask        0     0       0      1   1      0      0        0      1   1        two spans
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from verl_mg.data.images import ImageSource
from verl_mg.data.records import Record
from verl_mg.data.rendering import (
    has_image_parts,
    is_conversation,
    plain_conversation,
    render_conversation,
    with_argument_values,
)
from verl_mg.data.stop_tokens import end_of_turn
from verl_mg.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Fields of a message that say whether it is learned; OpenAI's fine-tuning has `weight`, 0 or 1.
FLAGS = ("train", "weight")


class TrainedRow(NamedTuple):
    """Tokens of a conversation, and which of them are learned."""

    tokens: tuple[int, ...]  # token ids up to the end of the last turn that is learned
    spans: tuple[tuple[int, int], ...]
    """First token of each turn that is learned, and the token after its end, in order."""

    @property
    def mask(self) -> list[bool]:
        """Whether each token is learned."""
        mask = [False] * len(self.tokens)
        for start, end in self.spans:
            mask[start:end] = [True] * (end - start)
        return mask


def trained_rows(
    value: Any,
    loss_on: Literal["last", "all", "flagged"],
    tokenizer: "PreTrainedTokenizerBase",
    place: str,
    tools: Sequence[dict[str, Any]] = (),
    system_prompt: str = "",
    images: Sequence[ImageSource] = (),
) -> tuple[TrainedRow, ...]:
    """Returns the rows that train the chosen turns of a conversation.

    A turn is trained after exactly the tokens that precede it when it is generated: the messages before it, rendered
    with the generation prompt. It ends with the special token that ends the turn. Turns are in one row as long as each
    context begins with the row so far; where the template rewrites earlier turns, such as by leaving out their
    thinking, a new row begins.
    """
    if not is_conversation(value):
        raise UserError(
            f"{place}: {value!r:.60} is not a conversation, whose turns data.loss_on={loss_on} trains. Write a list of "
            "messages, or set data.loss_on=answer."
        )
    if images or has_image_parts(value):
        raise UserError(
            f"{place}: a conversation with images, of which data.loss_on={loss_on} trains no turns. Set "
            "data.loss_on=answer to train the last answer, or leave the record out."
        )
    chosen = _chosen_turns(value, loss_on, place)
    unflagged = [{name: field for name, field in message.items() if name not in FLAGS} for message in value]
    messages = plain_conversation(unflagged, place, system_prompt)
    added = len(messages) - len(value)
    with_values = [with_argument_values(message) for message in messages]
    if with_values != messages:
        with suppress(UserError):  # a template that takes only texts
            render_conversation(with_values, tokenizer, place, tools, for_reply=False)
            messages = with_values
    texts: list[tuple[str, str]] = []
    for turn in chosen:
        # Not from one rendering of the whole: templates remove the thinking of earlier turns, which was generated.
        position = turn + added
        context = render_conversation(messages[:position], tokenizer, place, tools)
        whole = render_conversation(messages[: position + 1], tokenizer, place, tools, for_reply=False)
        if not whole.startswith(context):
            raise UserError(
                f"{place}: message {turn + 1}, as the chat template renders it, does not begin with the template's "
                "generation prompt, so the policy could not write it. Change the template, or leave the message out of "
                "the loss by weight: 0."
            )
        texts.append((context, whole))
    ids: list[list[int]] = tokenizer([*chain.from_iterable(texts)], add_special_tokens=False)["input_ids"]
    rows: list[TrainedRow] = []
    for turn, (context, whole), before, joined in zip(chosen, texts, ids[::2], ids[1::2], strict=True):
        if joined[: len(before)] != before:  # a token would begin in the context and end in the turn
            joined = before + tokenizer(whole[len(context) :], add_special_tokens=False)["input_ids"]
        tokens = tuple(joined[: _end_of_turn(joined, len(before), tokenizer, f"{place}: message {turn + 1}")])
        # By tokens, not by text: a template may rewrite earlier turns, and tokens merge over their ends.
        continues = bool(rows) and tokens[: min(len(before), len(rows[-1].tokens))] == rows[-1].tokens
        spans = rows.pop().spans if continues else ()
        rows.append(TrainedRow(tokens, (*spans, (len(before), len(tokens)))))
    return tuple(rows)


def tools_of(record: Record, place: str) -> list[dict[str, Any]]:
    """Returns the schemas of the tools that a record describes: a list, or its JSON text; [] if it has none."""
    tools = record.get("tools") or []
    if isinstance(tools, str):
        with suppress(ValueError, RecursionError):  # the error below shows the text
            tools = json.loads(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{place}: 'tools' is not a list of schemas: {tools!r:.60}. Write one, or leave the field out.")
    return tools


def _chosen_turns(messages: Sequence[dict[str, Any]], loss_on: str, place: str) -> list[int]:
    flags = [_flag(message, f"{place}: message {i}") for i, message in enumerate(messages, start=1)]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if loss_on == "last":
        chosen = turns[-1:]
    else:
        chosen = [i for i in turns if (flags[i] if loss_on == "flagged" else flags[i] is not False)]
    if not chosen:
        wanted = " with train: true or weight: 1" if loss_on == "flagged" else " to learn" if turns else ""
        raise UserError(
            f"{place}: no assistant message{wanted}, and data.loss_on is {loss_on}. Flag or write one, or leave the "
            "record out."
        )
    if chosen[0] == 0:
        raise UserError(
            f"{place}: message 1 is the assistant's, with nothing before it to answer. Begin with a message of the "
            "user, or give it weight: 0 with data.loss_on=all."
        )
    return chosen


def _flag(message: dict[str, Any], where: str) -> bool | None:
    """Returns whether a message says that it is learned; None if it does not say."""
    written = [(name, message[name]) for name in FLAGS if message.get(name) is not None]
    if not written:
        return None
    name, value = written[0]
    if value not in (0, 1) or len(written) > 1:
        wrong = f"{name} is {value!r}" if len(written) == 1 else "both train and weight"
        raise UserError(f"{where}: {wrong}. Write one of train: true, train: false, weight: 1 and weight: 0.")
    if value and message["role"] != "assistant":
        raise UserError(
            f"{where}: {name} is {value!r}, but its role is {message['role']}, and only turns of the assistant are "
            f"learned. Remove {name}."
        )
    return bool(value)


def _end_of_turn(tokens: Sequence[int], start: int, tokenizer: "PreTrainedTokenizerBase", where: str) -> int:
    """Returns the position after the token that ends a turn; UserError where the template writes none."""
    # An appended eos_token instead would train an end that the template never writes.
    end = end_of_turn(tokens, start, tokenizer)
    if end is None:
        raise UserError(
            f"{where} does not end with a special token in the chat template, so the policy would not learn to stop. "
            "Use a template that ends messages of the assistant, such as with eos_token."
        )
    return end
