"""The reward as a rollout and a recipe see it: samples are scored while others are still being written."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.batch import Batch, ColumnKind
from verl_mg.data import Prompt, Prompts
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.rewards import AsyncScorer, Reward, Sample
from verl_mg.rollout.engine import Sample as Written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_ANSWER = 0


class RewardRole:
    """Asks a panel about samples, as text. A row of a batch is read back as text with the prompt of its `prompt_id`."""

    def __init__(self, panel: AsyncScorer, prompts: Prompts, tokenizer: PreTrainedTokenizerBase) -> None:
        self._panel, self._prompts, self._tokenizer = panel, prompts, tokenizer

    def __call__(self, batch: Batch) -> Tensor:
        """(n,) float32, what the rows' samples were given; see `columns` for what else is in the batch."""
        return batch["reward"]

    def refresh(self) -> dict[str, float]:
        """The weights of a mixture for this iteration, as rank 0 reads them; all ranks call it together."""
        mixture = self._panel.mixture
        if mixture is None:
            return {}
        mixture.use(all_gather_json(mixture.refresh() if dist.get_rank() == 0 else {})[0])
        return {f"reward/weight/{name}": weight for name, weight in mixture.weights.items()}

    def begin(self, prompt: Prompt, written: Written) -> None:
        """Start to score a sample that this rank's engine has finished; returns at once."""
        self._panel.submit(written.id, self._sample(prompt, written.tokens, written.finish != "stop"))

    def forget(self, ids: Sequence[int]) -> None:
        """Drop samples that nobody will ask for, known or not."""
        for i in ids:
            self._panel.discard(i)

    def columns(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """What the samples were given, in sequence columns; waits for it. All ranks call it together.

        `reward` (n,) float32; `reward.PART` the same, NaN where a reward lacks the part; `answer` (n,) int64, equal for
        equal final answers, NO_ANSWER where none was found.
        """
        rewards = [self._panel.result(i) for i in ids]
        self.forget(ids)
        own = sorted({name for reward in rewards for name in reward.parts})
        # A part that only some ranks have seen is a column on all, or batches would not fit together.
        parts = sorted({name for names in all_gather_json(own) for name in names})
        columns = {
            f"reward.{part}": _column([reward.parts.get(part, float("nan")) for reward in rewards]) for part in parts
        }
        columns["reward"] = _column([reward.value for reward in rewards])
        columns["answer"] = torch.tensor([_number(reward) for reward in rewards], dtype=torch.int64)
        return columns

    def add_columns(self, batch: Batch) -> None:
        """`columns` of a batch of samples that were begun here."""
        for name, values in self.columns(batch["sample_id"].tolist()).items():
            batch.put(name, values, ColumnKind.SEQUENCE)

    def sample(self, batch: Batch, row: int) -> Sample:
        """A row as a reward and a reader see it."""
        prompt = self._prompts.by_id(int(batch["prompt_id"][row]))
        response = batch.row("tokens", row)[int(batch["prompt_length"][row]) :]
        return self._sample(prompt, response.tolist(), bool(batch["truncated"][row]))

    def close(self) -> None:
        """Let go of what the rewards hold."""
        self._panel.close()

    def _sample(self, prompt: Prompt, response: Sequence[int], truncated: bool) -> Sample:
        text = self._tokenizer.decode(response, skip_special_tokens=True)
        return Sample(prompt.text, text, prompt.answer, prompt.record, "length" if truncated else "stop")


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _number(reward: Reward) -> int:
    """Of an answer, the same on every rank."""
    if reward.answer is None:
        return NO_ANSWER
    return int.from_bytes(hashlib.blake2b(reward.answer.encode(), digest_size=8).digest()) >> 1 or 1
