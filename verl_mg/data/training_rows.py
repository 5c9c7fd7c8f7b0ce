"""Prompts with answers as training rows: demonstrations for fine-tuning, preference pairs for DPO and reward models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_mg.batch import Batch, ColumnKind
from verl_mg.data.prompts import Prompt
from verl_mg.data.rendering import check_same_context, choice_of, context_of
from verl_mg.data.trained_turns import TrainedRow
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase
else:
    torch = lazy_import("torch")


def demonstration(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> tuple[list[int], int]:
    """Returns (prompt_length + answer_length + 1,) tokens of prompt, answer and end of sequence, and prompt_length.

    Args:
        prompt, tokenizer: a prompt with an answer, and the tokenizer of the model.
        max_tokens: largest length of the row, in tokens; UserError for a longer one.
    """
    if not prompt.answer:
        fields = ", ".join(sorted(prompt.record))
        raise UserError(
            f"{prompt.where}: no answer to learn from. Set data.answer_field to one of: {fields}; a "
            "message with only tool_calls is learned with data.loss_on=last."
        )
    return _answered(prompt, prompt.answer, tokenizer, max_tokens), len(prompt.tokens)


def _answered(prompt: Prompt, answer: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[int]:
    """Returns the tokens of a prompt, of an answer to it, and the end of sequence."""
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no eos_token. Set it in its tokenizer_config.json.")
    # Tokenized separately, without special tokens, as the policy would write it.
    ids: list[int] = tokenizer(answer, add_special_tokens=False)["input_ids"]
    tokens = [*prompt.tokens, *ids, tokenizer.eos_token_id]
    if len(tokens) > max_tokens:
        raise UserError(
            f"{prompt.where}: {len(tokens)} tokens with its answer, and the limit is {max_tokens}. "
            "Raise the limit or shorten the answer."
        )
    return tokens


def num_demonstrations(prompts: Sequence[Prompt]) -> int:
    """Returns the number of rows of `demonstrations_batch` over all ranks: a conversation may need several."""
    return sum(max(1, len(prompt.turns)) for prompt in prompts)


def demonstrations_batch(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    first_id: int,
    rank: int = 0,
    ranks: int = 1,
) -> Batch:
    """Returns this rank's rows of a batch of demonstrations: of answers, or of turns where prompts have them.

    The columns are tokens, prompt_length, loss_mask, prompt_id, sample_id.

    Args:
        prompts: prompts with answers, or with turns, the same on every rank.
        tokenizer: tokenizer of the model.
        max_tokens: largest length of a row, in tokens.
        first_id: sample id of the first row.
        rank, ranks: this rank has every `ranks`-th row from `rank` on.
    """
    numbered = [(prompt, i) for prompt in prompts for i in range(max(1, len(prompt.turns)))]
    mine = numbered[rank::ranks]
    rows = [_demonstration_row(prompt, i, tokenizer, max_tokens) for prompt, i in mine]
    # Ids as if one rank had all rows: they do not depend on the number of ranks.
    sample_ids = range(first_id + rank, first_id + len(numbered), ranks)
    lengths = [(list(row.tokens), row.spans[0][0]) for row in rows]
    batch = _imitation_batch(lengths, [prompt for prompt, _ in mine], sample_ids)
    batch["loss_mask"] = torch.tensor([learned for row in rows for learned in row.mask], dtype=torch.bool)
    return batch


def _demonstration_row(prompt: Prompt, number: int, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> TrainedRow:
    if not prompt.turns:
        tokens, length = demonstration(prompt, tokenizer, max_tokens)
        return TrainedRow(tuple(tokens), ((length, len(tokens)),))
    row = prompt.turns[number]
    if len(row.tokens) > max_tokens:
        raise UserError(
            f"{prompt.where}: the conversation has {len(row.tokens)} tokens, and the limit is {max_tokens}. Lower "
            "data.max_prompt_tokens with data.overlong_prompts=drop, or shorten it."
        )
    return row


def _imitation_batch(
    rows: Sequence[tuple[list[int], int]], prompts: Sequence[Prompt], sample_ids: Sequence[int]
) -> Batch:
    """Returns a batch whose loss is computed on the tokens after each prompt; a row is ids and its prompt's length."""
    batch = Batch.from_rows(tokens for tokens, _ in rows)
    batch["prompt_length"] = torch.tensor([length for _, length in rows], dtype=torch.int64)
    batch["loss_mask"] = batch.positions >= batch.expand_to_tokens(batch["prompt_length"])
    batch["prompt_id"] = torch.tensor([prompt.id for prompt in prompts], dtype=torch.int64)
    batch["sample_id"] = torch.tensor(sample_ids, dtype=torch.int64)
    if any(prompt.images for prompt in prompts):
        batch.images = [prompt.load_images() for prompt in prompts]
    return batch


def preference(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    chosen_field: str = "chosen",
    rejected_field: str = "rejected",
) -> tuple[list[int], list[int], int]:
    """Returns the tokens of the prompt with its chosen and with its rejected answer, and the prompt's length.

    Each has an end of sequence, and (prompt_length + answer_length + 1,) ids.

    Args:
        prompt: a prompt whose record has both answers.
        tokenizer: tokenizer of the model.
        max_tokens: largest length of a row, in tokens; UserError for a longer one.
        chosen_field, rejected_field: fields of the answers: a string, or messages of which the last is the answer
            and the others are the conversation of the prompt.
    """
    chosen = choice_of(prompt.record, chosen_field, "chosen_field", prompt.where)
    rejected = choice_of(prompt.record, rejected_field, "rejected_field", prompt.where)
    _check_context(prompt, chosen_field, rejected_field)
    first, second = (_answered(prompt, answer, tokenizer, max_tokens) for answer in (chosen, rejected))
    return first, second, len(prompt.tokens)


def pairs_batch(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    first_pair: int,
    chosen_field: str = "chosen",
    rejected_field: str = "rejected",
    rank: int = 0,
    ranks: int = 1,
) -> Batch:
    """Returns this rank's rows of a batch of preference pairs: two rows per prompt, chosen before rejected.

    Args:
        prompts: prompts whose records have both answers, the same on every rank.
        tokenizer: tokenizer of the model.
        max_tokens: largest length of a row, in tokens.
        first_pair: number of the pair of `prompts[0]`.
        chosen_field, rejected_field: fields of the answers, see `preference`.
        rank, ranks: this rank has every `ranks`-th prompt from `rank` on.

    Returns:
        Columns tokens, prompt_length, loss_mask, prompt_id; `pair` and `group`, (n,) int64, the number of the pair;
        sample_id, 2 pair for the chosen row and 2 pair + 1 for the rejected; `chosen`, (n,) bool.
    """
    mine = range(rank, len(prompts), ranks)
    pairs = [preference(prompts[i], tokenizer, max_tokens, chosen_field, rejected_field) for i in mine]
    rows = [(tokens, length) for *both, length in pairs for tokens in both]
    numbers = [first_pair + i for i in mine for _ in range(2)]
    samples = [2 * (first_pair + i) + side for i in mine for side in range(2)]
    batch = _imitation_batch(rows, [prompts[i] for i in mine for _ in range(2)], samples)
    batch["group"] = torch.tensor(numbers, dtype=torch.int64)
    # A rank without rows needs the kinds of the columns too.
    batch.put("pair", batch["group"].clone(), ColumnKind.SEQUENCE)
    batch.put("chosen", batch["sample_id"] % 2 == 0, ColumnKind.SEQUENCE)
    return batch


def _check_context(prompt: Prompt, chosen_field: str, rejected_field: str) -> None:
    """Checks that the answers end the same conversation, and that the prompt contains all its user messages."""
    chosen, rejected = (context_of(prompt.record[name]) for name in (chosen_field, rejected_field))
    check_same_context((chosen, rejected), chosen_field, rejected_field, prompt.where)
    # Looked up in the text, since templates strip messages and omit some of the other roles.
    texts = [message["content"] for message in chosen if message["role"] == "user"]
    if missing := [text for text in texts if isinstance(text, str) and text.strip() not in prompt.text]:
        raise UserError(
            f"{prompt.where}: '{chosen_field}' answers a longer conversation than the prompt ({missing[0][:40]!r} is "
            f"not in it). Set data.prompt_field={chosen_field} to take the prompt from there."
        )
