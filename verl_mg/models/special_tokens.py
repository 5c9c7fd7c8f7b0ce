"""Special tokens: the text of tokens with them, and those that a tokenizer adds to a text by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def exact_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """Returns the text of tokens as they are: special ones included, spaces unchanged."""
    text = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


class AddedTokens(NamedTuple):
    """Token ids before a text and after it: <bos> and none with Llama's tokenizer, none and <eos> with T5's."""

    front: tuple[int, ...]
    end: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, text: str) -> AddedTokens:
        """Returns what a tokenizer adds to a text with at least one token."""
        # By comparison: fields such as add_bos_token do not say what the post-processor of tokenizer.json does.
        alone = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        whole = list(tokenizer(text)["input_ids"])
        starts = [i for i in range(len(whole) - len(alone) + 1) if whole[i : i + len(alone)] == alone]
        # The last place: a text that begins with <bos> is "<bos> <bos> ...", of which the first one was added.
        return (
            cls(tuple(whole[: starts[-1]]), tuple(whole[starts[-1] + len(alone) :]))
            if starts and alone
            else cls((), ())
        )
