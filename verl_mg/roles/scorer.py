"""The reward as a recipe sees it: rows in, a score a row out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.data.prompts import PromptSet
from verl_mg.megatron.collectives import all_gather_json
from verl_mg.rewards import Reward, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Scorer:
    """Calls a reward function on this rank's rows. A row is read back as text: its prompt is found by `prompt_id`."""

    def __init__(
        self, function: Callable[[Sample], Reward], prompts: PromptSet, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._function, self._prompts, self._tokenizer = function, prompts, tokenizer

    def __call__(self, batch: Batch) -> Tensor:
        """(n,) float32; all ranks call it together.

        The parts of the rewards become sequence columns `reward.PART` of the batch, NaN where a reward lacks the part.
        """
        rewards = [self._function(self.sample(batch, row)) for row in range(len(batch))]
        own = sorted({name for reward in rewards for name in reward.parts})
        # A part that only some ranks have seen is a column on all, or batches would not fit together.
        for part in sorted({name for names in all_gather_json(own) for name in names}):
            batch[f"reward.{part}"] = _column([reward.parts.get(part, float("nan")) for reward in rewards])
        return _column([reward.value for reward in rewards])

    def over(self, prompts: PromptSet) -> Scorer:
        """The same reward for answers to other prompts."""
        return Scorer(self._function, prompts, self._tokenizer)

    def sample(self, batch: Batch, row: int) -> Sample:
        """A row as a reward function and a reader see it."""
        prompt = self._prompts.by_id(int(batch["prompt_id"][row]))
        response = batch.row("tokens", row)[int(batch["prompt_length"][row]) :]
        text = self._tokenizer.decode(response, skip_special_tokens=True)
        truncated = bool(batch["truncated"][row])
        return Sample(prompt.text, text, prompt.answer, prompt.record, "length" if truncated else "stop")


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)
