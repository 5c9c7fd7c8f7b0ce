"""A prompt and its answer as one training row, for supervised fine-tuning."""

from typing import TYPE_CHECKING

from verl_mg.data.prompts import Prompt
from verl_mg.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def demonstration(
    prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", max_tokens: int
) -> tuple[list[int], int]:
    """The tokens of prompt, answer and end of sequence, and how many of them are the prompt's.

    The answer is tokenised by itself, without special tokens, as the policy would write it.

    Returns:
        tokens: `(prompt_length + answer length + 1,)` ids, the last one `tokenizer.eos_token_id`.
        prompt_length: the tokens before the answer; the loss falls on those from here on.

    Raises:
        UserError: the prompt has no answer, the tokenizer has no end-of-sequence token, or the row is
            longer than `max_tokens`.
    """
    place = f"data row {prompt.id + 1} ({prompt.text[:40]!r})"
    if not prompt.answer:
        fields = ", ".join(sorted(prompt.record))
        raise UserError(f"{place}: no answer to learn from; set data.answer_field to one of: {fields}")
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token; set one in its tokenizer_config.json")
    answer: list[int] = tokenizer(prompt.answer, add_special_tokens=False)["input_ids"]
    tokens = [*prompt.tokens, *answer, tokenizer.eos_token_id]
    if len(tokens) > max_tokens:
        raise UserError(
            f"{place}: {len(tokens)} tokens with its answer, and the limit is {max_tokens}; "
            "raise the limit or shorten the answer"
        )
    return tokens, len(prompt.tokens)
