"""Alignment of the tokens of two tokenizers by their text.

A span is a piece of text that begins and ends at boundaries of both, and has no such boundary inside:

    student    str | aw | berry |  pie        spans    straw    berry    pie
    teacher    straw    | ber | ry | _pie              2 + 1    1 + 2    1 + 1 tokens

The probability of a span's text, after the text in front of it, is the product of the probabilities of its tokens for
each of the tokenizers: log-probs of spans can be compared where log-probs of tokens cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_mg.errors import UserError
from verl_mg.models.special_tokens import exact_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"  # character that decoders write for bytes that are no whole character


def token_ends(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[int | None]]:
    """Decodes tokens; returns the text and for each token the characters up to its end, None within a character."""
    ends: list[int | None] = []
    text, start = "", 0
    for number in range(len(tokens)):
        # With the token in front: decoders of SentencePiece drop the space that a text begins with.
        context = list(tokens[max(start - 1, 0) : start])
        before = exact_text(tokenizer, context)
        piece = exact_text(tokenizer, [*context, *tokens[start : number + 1]])[len(before) :]
        if piece.endswith(INCOMPLETE) and number + 1 < len(tokens):
            ends.append(None)
            continue
        text, start = text + piece, number + 1
        ends.append(len(text))
    return text, ends


def retokenized(text: str, tokenizer: PreTrainedTokenizerBase, key: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the tokens of a text, and where the text of each begins and ends."""
    if not tokenizer.is_fast:
        raise UserError(
            f"{key}: the tokenizer does not report places in the text. Use a model with a file tokenizer.json."
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(encoded["input_ids"]), [(int(start), int(end)) for start, end in encoded["offset_mapping"]]


def aligned_spans(
    ends: Sequence[int | None], places: Sequence[tuple[int, int]], length: int
) -> tuple[list[int], list[int]]:
    """Returns the number of the span, from 0 on, of each token of both sides."""
    starts = [start for start, _ in places[1:]] + [length]
    first: list[int] = []
    second: list[int] = []
    span = 0
    for end in ends:
        first.append(span)
        if end is None:
            continue
        token = len(second)
        while token < len(places) and starts[token] < end:  # tokens within one character overlap
            token += 1
        if token == len(places) or places[token][1] > end:
            continue
        while token + 1 < len(places) and places[token + 1][1] <= end:  # tokens without text
            token += 1
        second += [span] * (token + 1 - len(second))
        span += 1
    last = max(span - 1, 0)
    return [min(number, last) for number in first], second + [last] * (len(places) - len(second))
