"""A prompt and its answer as one training row, for supervised fine-tuning."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from verl_mg.batch import Batch
from verl_mg.data.prompts import Prompt
from verl_mg.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def demonstration(prompt: Prompt, tokenizer: "PreTrainedTokenizerBase", max_tokens: int) -> tuple[list[int], int]:
    """The tokens of prompt, answer and end of sequence, and how many of them are the prompt's.

    Returns:
        tokens: `(prompt_length + answer length + 1,)` ids, the last one `tokenizer.eos_token_id`.
        prompt_length: the tokens before the answer; the loss falls on those from here on.

    Raises:
        UserError: the prompt has no answer, the tokenizer has no end-of-sequence token, or the row is
            longer than `max_tokens`.
    """
    if not prompt.answer:
        fields = ", ".join(sorted(prompt.record))
        raise UserError(f"{prompt.where}: no answer to learn from; set data.answer_field to one of: {fields}")
    return answered(prompt, prompt.answer, tokenizer, max_tokens), len(prompt.tokens)


def answered(prompt: Prompt, answer: str, tokenizer: "PreTrainedTokenizerBase", max_tokens: int) -> list[int]:
    """The tokens of a prompt, of an answer to it, and the end of sequence.

    The answer is tokenised by itself, without special tokens, as the policy would write it.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token; set one in its tokenizer_config.json")
    ids: list[int] = tokenizer(answer, add_special_tokens=False)["input_ids"]
    tokens = [*prompt.tokens, *ids, tokenizer.eos_token_id]
    if len(tokens) > max_tokens:
        raise UserError(
            f"{prompt.where}: {len(tokens)} tokens with its answer, and the limit is {max_tokens}; "
            "raise the limit or shorten the answer"
        )
    return tokens


def demonstrations_batch(
    prompts: Sequence[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int,
    first_id: int,
    rank: int = 0,
    ranks: int = 1,
) -> Batch:
    """Every `ranks`-th prompt from `rank` on with its answer, as rows to imitate.

    Columns: tokens, prompt_length, loss_mask, prompt_id, and sample_id, which is `first_id` for `prompts[0]`.
    """
    mine = range(rank, len(prompts), ranks)
    rows = [demonstration(prompts[i], tokenizer, max_tokens) for i in mine]
    return imitation_batch(rows, [prompts[i].id for i in mine], [first_id + i for i in mine])


def imitation_batch(
    rows: Sequence[tuple[list[int], int]], prompt_ids: Sequence[int], sample_ids: Sequence[int]
) -> Batch:
    """Rows of tokens, each with its number of prompt tokens; the loss falls on the others."""
    batch = Batch.from_rows(tokens for tokens, _ in rows)
    batch["prompt_length"] = torch.tensor([length for _, length in rows], dtype=torch.int64)
    batch["loss_mask"] = batch.positions >= batch.expand_to_tokens(batch["prompt_length"])
    batch["prompt_id"] = torch.tensor(prompt_ids, dtype=torch.int64)
    batch["sample_id"] = torch.tensor(sample_ids, dtype=torch.int64)
    return batch
