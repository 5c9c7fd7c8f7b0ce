"""Reward from a Hugging Face model with a classification head, on the device of the rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_mg.device import current_device
from verl_mg.errors import UserError
from verl_mg.models.special_tokens import AddedTokens
from verl_mg.rewards.reward import Reward, Sample

# Tokens; rows are padded to this length or to the next power of two.
MIN_PADDED_LENGTH = 32


class Classifier:
    """Scores prompt and response with a sequence classification model.

    With one label the reward is its logit; with several it is the probability of `label`, a name of the model's
    `id2label` or a number.

    The text is prompt and response; where the record's field `messages` is a conversation and the tokenizer has a
    chat template, it is that conversation with the response as the assistant's turn.
    """

    def __init__(
        self,
        path: str | Path,
        batch_size: int = 8,
        max_tokens: int = 4096,
        device: str | None = None,
        dtype: str = "float32",
        label: str | int | None = None,
        messages: str = "prompt",
    ) -> None:
        """Loads the model.

        Args:
            path: directory with config.json, safetensors and a tokenizer; nothing is downloaded.
            batch_size: rows per forward pass.
            max_tokens: a longer text is cut at its beginning.
            device: device of the model; None for the rank's.
            dtype: "float32", "bfloat16" or "float16".
            label: name in the model's `id2label`, or number, of the label whose probability is the reward; needed
                for several labels.
            messages: field of the record with the conversation.
        """
        if batch_size < 1 or max_tokens < 1:
            raise UserError(f"batch_size={batch_size}, max_tokens={max_tokens}: out of range. Give at least 1.")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise UserError(f"dtype: {dtype!r} is not supported. Write float32, bfloat16 or float16.")
        self._device = torch.device(device) if device else current_device()
        self._model, self._tokenizer = _load(Path(path), getattr(torch, dtype))
        self._model.to(self._device).eval().requires_grad_(False)
        config = self._model.config.get_text_config()
        self._label = _label_number(self._model.config, label, path)
        self._padding: int | None = config.pad_token_id
        self._max_tokens = min(max_tokens, getattr(config, "max_position_embeddings", max_tokens))
        self._messages = messages
        # Without a padding token rows are scored one by one.
        self.batch_size = batch_size if self._padding is not None else 1

    def score_many(self, samples: Sequence[Sample]) -> list[Reward]:
        """Returns one reward per sample, without parts."""
        rows = [self._tokens(sample) for sample in samples]
        values: dict[int, float] = {}
        by_length: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            by_length.setdefault(self._padded_length(len(row)), []).append(number)
        # Batches by padded length: kernels, and with them the last digits of a score, depend on the shape. A score is
        # bitwise independent of the other rows of its batch, which always has `batch_size` of them.
        for length, numbers in by_length.items():
            for start in range(0, len(numbers), self.batch_size):
                chosen = numbers[start : start + self.batch_size]
                scores = self._scores([rows[number] for number in chosen], length)
                values |= dict(zip(chosen, scores.tolist(), strict=True))
        return [Reward(values[number]) for number in range(len(rows))]

    def _padded_length(self, length: int) -> int:
        if self._padding is None:
            return length
        return min(max(MIN_PADDED_LENGTH, 1 << (length - 1).bit_length()), self._max_tokens)

    @torch.inference_mode()
    def _scores(self, rows: Sequence[Sequence[int]], length: int) -> Tensor:
        """Returns scores, `(rows,)`, float32, on the CPU."""
        ids = torch.full((self.batch_size, length), self._padding or 0)
        mask = torch.zeros_like(ids)
        for number in range(self.batch_size):
            row = rows[number % len(rows)]  # a row that contains only padding would give NaN
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        logits = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device)).logits.float()
        scores: Tensor = logits[:, 0] if self._label is None else logits.softmax(-1)[:, self._label]
        return scores[: len(rows)].cpu()

    def _tokens(self, sample: Sample) -> list[int]:
        text, special = self._text(sample)
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        front, end = AddedTokens.of(self._tokenizer, text) if special and tokens else AddedTokens((), ())
        # The policy's template may have written the token of the beginning already.
        front = () if tuple(tokens[: len(front)]) == front else front
        end = () if end and tuple(tokens[-len(end) :]) == end else end
        kept = max(self._max_tokens - len(front) - len(end), 0)
        tokens = [*front, *tokens[max(len(tokens) - kept, 0) :], *end]
        # A row without tokens has no position whose score could be read.
        return tokens or [self._tokenizer.eos_token_id or 0]

    def _text(self, sample: Sample) -> tuple[str, bool]:
        """Returns the text and whether it needs the tokenizer's special tokens; a chat template writes them itself."""
        messages = sample.record.get(self._messages)
        if self._tokenizer.chat_template is None or not isinstance(messages, list):
            return sample.prompt + sample.response, True
        whole = [*messages, {"role": "assistant", "content": sample.response}]
        return self._tokenizer.apply_chat_template(whole, tokenize=False), False


def _load(directory: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if not (directory / "config.json").is_file():
        raise UserError(f"{directory}: config.json is missing. Give the directory of a Hugging Face model.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            directory, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"{directory}: the classification model cannot be read ({error}). Give another directory."
        ) from error
    if report["missing_keys"]:
        missing = min(report["missing_keys"])
        raise UserError(f"{directory}: tensor {missing} is missing. Give a model that was trained for classification.")
    return model, tokenizer


def _label_number(config: Any, label: str | int | None, path: str | Path) -> int | None:
    """Returns the index of the logit that is the reward; None where there is only one."""
    names: dict[int, str] = config.id2label
    if len(names) == 1 and label is None:
        return None
    numbers = {name: number for number, name in names.items()}
    number = numbers.get(label) if isinstance(label, str) else label
    if number not in names:
        raise UserError(f"label: {label!r} is not a label of {path}. Write one of: {', '.join(numbers)}.")
    return number if len(names) > 1 else None
