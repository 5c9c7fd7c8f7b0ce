"""Scores of each prompt of an evaluation, from which metrics, intervals and comparisons are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from verl_mg.algorithms.at_k import avg_at_k, maj_at_k, pass_at_k
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

Scores: TypeAlias = "Mapping[str, Tensor]"
"""Metrics by name, (prompts,) float64 each; NaN for a prompt none of whose samples have a part of the reward."""


@dataclass(frozen=True)
class PromptResults:
    """Results of all samples of one prompt."""

    prompt_id: int
    rewards: list[float]
    answers: list[str | None]
    """Key of the final answer of each sample; None where the reward function returned none."""
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    """Parts of the reward by name, each of all samples; None for a sample without the part."""


def default_ks(samples: int) -> tuple[int, ...]:
    """Returns 1, 2, 4, ... and `samples`: for 6 samples (1, 2, 4, 6), for a single one nothing."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i < samples]
    return (*powers, samples) if samples > 1 else ()


def prompt_scores(results: Sequence[PromptResults], ks: Sequence[int], pass_threshold: float) -> dict[str, Tensor]:
    """Returns the metrics of each prompt, whose means are the metrics of the set.

    With n samples of each prompt these are `reward`, the mean of its samples, and `reward/PART` for its parts, over the
    samples that have the part; for each k `pass@k` and, if the reward function returns final answers, `maj@k`; and
    `avg@n` where n is among the k. Example: one prompt with the rewards 1, 0, 1, 0, and a threshold of 0.5: reward and
    avg@4 0.5, pass@1 0.5, pass@2 0.83.
    """
    rewards = torch.tensor([result.rewards for result in results], dtype=torch.float64)
    threshold = float(torch.tensor(pass_threshold, dtype=torch.float32))  # as rewards are rounded
    answers = [result.answers for result in results]
    answered = any(answer is not None for row in answers for answer in row)
    scores = {"reward": rewards.mean(1)}
    for part in _parts(results):
        rows = [_values(result, part) for result in results]
        means = [torch.tensor(row).double().mean().item() if row else math.nan for row in rows]
        scores[f"reward/{part}"] = torch.tensor(means, dtype=torch.float64)
    for k in ks:
        scores[f"pass@{k}"] = pass_at_k(rewards >= threshold, k)
        if k == rewards.shape[1]:
            scores[f"avg@{k}"] = avg_at_k(rewards, k)
        if answered and k > 1:
            scores[f"maj@{k}"] = maj_at_k(answers, rewards, k)
    return scores


def samples_with(results: Sequence[PromptResults]) -> dict[str, int]:
    """Returns the number of samples that have a part of the reward, by part, of the parts that not all samples have."""
    every = sum(len(result.rewards) for result in results)
    return {part: count for part, count in part_counts(results).items() if count < every}


def part_counts(results: Sequence[PromptResults]) -> dict[str, int]:
    """Returns the number of samples that have a part of the reward, by part."""
    return {part: sum(len(_values(result, part)) for result in results) for part in _parts(results)}


def known(values: Tensor) -> Tensor:
    """Returns the scores of the prompts that have one, see `Scores`."""
    return values[~values.isnan()]


def _parts(results: Sequence[PromptResults]) -> list[str]:
    return list(dict.fromkeys(part for result in results for part in result.parts))


def _values(result: PromptResults, part: str) -> list[float]:
    return [value for value in result.parts.get(part, ()) if value is not None]


def is_bounded(metric: str) -> bool:
    """Returns whether a metric is between 0 and 1 whatever the rewards are: pass@k is a probability."""
    return metric.startswith("pass@")
