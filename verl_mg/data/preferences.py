"""A prompt with a chosen and a rejected answer as two training rows, for DPO and reward models."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from verl_mg.batch import Batch, ColumnKind
from verl_mg.data.demonstrations import answered, imitation_batch
from verl_mg.data.fields import check_same_context, choice_of, context_of
from verl_mg.data.prompts import Prompt
from verl_mg.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def preference(
    prompt: Prompt,
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int,
    chosen_field: str = "chosen",
    rejected_field: str = "rejected",
) -> tuple[list[int], list[int], int]:
    """The prompt's tokens followed by its chosen, and by its rejected answer, each with an end of sequence.

    Args:
        chosen_field: in the record a string, or messages of which the last is the answer; messages before it are the
            conversation that the prompt is. `rejected_field` likewise.

    Returns:
        chosen_tokens: `(prompt_length + chosen answer length + 1,)` ids.
        rejected_tokens: likewise.
        prompt_length: the tokens before the answer, those of the prompt.

    Raises:
        UserError: an answer is missing or no text, the two answer different conversations or another one than the
            prompt, or a row is longer than `max_tokens`.
    """
    chosen = choice_of(prompt.record, chosen_field, "chosen_field", prompt.where)
    rejected = choice_of(prompt.record, rejected_field, "rejected_field", prompt.where)
    _check_context(prompt, chosen_field, rejected_field)
    first, second = (answered(prompt, answer, tokenizer, max_tokens) for answer in (chosen, rejected))
    return first, second, len(prompt.tokens)


def pairs_batch(
    prompts: Sequence[Prompt],
    tokenizer: "PreTrainedTokenizerBase",
    max_tokens: int,
    first_pair: int,
    chosen_field: str = "chosen",
    rejected_field: str = "rejected",
    rank: int = 0,
    ranks: int = 1,
) -> Batch:
    """Two rows, chosen before rejected, for every `ranks`-th prompt from `rank` on.

    Columns: tokens, prompt_length, loss_mask, prompt_id; `pair` (n,) int64, which is `first_pair` for `prompts[0]`;
    `group`, the same; sample_id, 2 pair for the chosen row and 2 pair + 1 for the rejected; `chosen` (n,) bool.
    """
    mine = range(rank, len(prompts), ranks)
    pairs = [preference(prompts[i], tokenizer, max_tokens, chosen_field, rejected_field) for i in mine]
    rows = [(tokens, length) for *both, length in pairs for tokens in both]
    numbers = [first_pair + i for i in mine for _ in range(2)]
    samples = [2 * (first_pair + i) + side for i in mine for side in range(2)]
    batch = imitation_batch(rows, [prompts[i].id for i in mine for _ in range(2)], samples)
    batch["group"] = torch.tensor(numbers, dtype=torch.int64)
    # A rank without a row must know the kinds as well.
    batch.put("pair", batch["group"].clone(), ColumnKind.SEQUENCE)
    batch.put("chosen", batch["sample_id"] % 2 == 0, ColumnKind.SEQUENCE)
    return batch


def _check_context(prompt: Prompt, chosen_field: str, rejected_field: str) -> None:
    """Where the answers end conversations, it is one conversation, and the prompt has all that the user said in it."""
    chosen, rejected = (context_of(prompt.record[name]) for name in (chosen_field, rejected_field))
    check_same_context(chosen, rejected, chosen_field, rejected_field, prompt.where)
    # In the text, for templates trim, and leave out what they like of the other roles.
    said = [message["content"] for message in chosen if message["role"] == "user"]
    if missing := [text for text in said if isinstance(text, str) and text.strip() not in prompt.text]:
        raise UserError(
            f"{prompt.where}: '{chosen_field}' answers a longer conversation than the prompt ({missing[0][:40]!r} is "
            f"not in it); set data.prompt_field={chosen_field} to take the prompt from there"
        )
