"""Samples of an iteration as a table for tracking services."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_mg.batch import Batch
from verl_mg.data import PromptFeed
from verl_mg.monitor.sample_schema import PART
from verl_mg.roles.reward import row_to_sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Cell = str | float | None
"""Value of a table; None where a sample has none."""


@dataclass(frozen=True)
class SampleTable:
    """Table with a row per sample."""

    columns: tuple[str, ...]
    rows: list[list[Cell]]


def sample_table(
    batches: Sequence[Batch], limit: int, iteration: int, prompts: PromptFeed, tokenizer: PreTrainedTokenizerBase
) -> SampleTable | None:
    """Makes a table of at most `limit` samples of this rank; None without samples."""
    # Equally far apart, since neighbours have the same prompt.
    # Of an agent's sample the last row, which contains the whole conversation unless it was rewritten.
    samples = [(batch, int(row)) for batch in batches for row in batch.last_rows]
    shown = [samples[i * len(samples) // limit] for i in range(limit)] if limit < len(samples) else samples
    names = dict.fromkeys(name for batch in batches for name in batch.names() if name.startswith(PART))
    columns = ("iteration", "prompt", "response", "answer", "reward", *(name.removeprefix(PART) for name in names))
    rows: list[list[Cell]] = []
    for batch, row in shown:
        sample = row_to_sample(batch, row, prompts, tokenizer)
        scores = [_number(batch, name, row) for name in ("reward", *names)]
        rows.append([float(iteration), sample.prompt, sample.response, sample.answer, *scores])
    return SampleTable(columns, rows) if rows else None


def _number(batch: Batch, name: str, row: int) -> float | None:
    value = float(batch[name][row]) if name in batch else float("nan")
    return value if value == value else None
