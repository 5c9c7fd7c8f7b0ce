"""Evaluation of the policy on test prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl_mg.algorithms.at_k import avg_at_k, maj_at_k, pass_at_k
from verl_mg.batch import Batch
from verl_mg.config import EvaluationConfig
from verl_mg.data import Prompts
from verl_mg.distributed.collectives import all_gather_column
from verl_mg.roles.reward import NO_ANSWER, RewardRole
from verl_mg.roles.rollout_source import RolloutSource


@dataclass(frozen=True)
class PromptResults:
    """Results of all samples of one prompt."""

    source: str
    """Data set of the prompt."""
    rewards: list[float]
    """Reward of each sample."""
    answers: list[str | None]
    """Key of the final answer of each sample; None where the reward function returned none."""


def evaluate(
    rollout: RolloutSource, reward: RewardRole, prompts: Prompts, config: EvaluationConfig
) -> dict[str, float]:
    """Evaluates the policy on the first `config.prompts` prompts of each source; all ranks call it together.

    Args:
        rollout: generates the samples.
        reward: scores them.
        prompts: test prompts.
        config: number of prompts and samples, temperature, and the minimum reward that passes.

    Returns:
        Metrics by name. `eval/reward` is the mean reward. With n samples of each prompt, for k = 1, 2, 4, ..., n:
        `eval/pass@k` and, if the reward function returns final answers, `eval/maj@k`; and `eval/avg@n`. With several
        sources, each source has the same metrics under `eval/SOURCE/`.
    """
    chosen = prompts.first(config.prompts)
    sources = {prompt.id: prompt.source for prompt in chosen}
    batch = rollout.generate_for_eval(chosen, config.samples, config.temperature)
    batch["reward"] = reward.wait(batch)
    results = _gather_results(batch, sources)
    metrics = metrics_of(results, "eval/", config.pass_threshold)
    names = sorted(set(sources.values()))
    for name in names if len(names) > 1 else ():
        of_source = [result for result in results if result.source == name]
        metrics |= metrics_of(of_source, f"eval/{name}/", config.pass_threshold)
    return metrics


def _gather_results(batch: Batch, sources: dict[int, str]) -> list[PromptResults]:
    """Gathers the results of all ranks, by prompt in the order of their first samples."""
    samples = batch.one_per_trajectory()
    columns = [all_gather_column(samples, name).tolist() for name in ("group", "prompt_id", "reward", "answer")]
    results: dict[int, PromptResults] = {}
    for group, prompt, reward, answer in zip(*columns, strict=True):
        result = results.setdefault(group, PromptResults(sources[prompt], [], []))
        result.rewards.append(reward)
        result.answers.append(None if answer == NO_ANSWER else str(answer))
    return list(results.values())


def metrics_of(results: Sequence[PromptResults], prefix: str, pass_threshold: float) -> dict[str, float]:
    """Computes the metrics described at `evaluate`.

    Args:
        results: samples of each prompt.
        prefix: prefix of the metrics' names.
        pass_threshold: minimum reward of a sample that passes.
    """
    rewards = torch.tensor([result.rewards for result in results], dtype=torch.float64)
    metrics = {f"{prefix}reward": float(rewards.mean())}
    answers = [result.answers for result in results]
    answered = any(answer is not None for row in answers for answer in row)
    for k in _ks(rewards.shape[1]):
        metrics[f"{prefix}pass@{k}"] = float(pass_at_k(rewards >= pass_threshold, k).mean())
        if k == rewards.shape[1]:
            metrics[f"{prefix}avg@{k}"] = float(avg_at_k(rewards, k).mean())
        if answered and k > 1:
            metrics[f"{prefix}maj@{k}"] = float(maj_at_k(answers, rewards, k).mean())
    return metrics


def _ks(samples: int) -> list[int]:
    """Returns 1, 2, 4, ... and `samples`; nothing for a single sample."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i < samples]
    return [*powers, samples] if samples > 1 else []
