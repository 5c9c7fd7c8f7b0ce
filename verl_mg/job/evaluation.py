"""Evaluation of the policy on test prompts, in training and by `verl-mg eval`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.config import Config, EvaluationSetConfig
from verl_mg.data import Prompt
from verl_mg.distributed.collectives import all_gather_column
from verl_mg.engines.trajectory import without_agent
from verl_mg.errors import UserError
from verl_mg.job.prompt_scores import PromptResults, Scores, default_ks, known, prompt_scores, samples_with
from verl_mg.roles.reward import NO_ANSWER, PART, RewardRole
from verl_mg.rollout.rollout import RolloutSource


@dataclass(frozen=True)
class EvaluationSet:
    """A set of test prompts and how it is evaluated."""

    name: str
    """Name in `data.test`; "" where that is a path."""
    prompts: int | None
    """Number of prompts, from the beginning of the set; None for all."""
    samples: int
    sampling: Mapping[str, Any]
    """Fields of `Sampling` that replace the values of training."""
    ks: tuple[int, ...]
    """Numbers of tries of pass@k and maj@k."""
    pass_threshold: float
    """Minimum reward of a sample that passes."""


@dataclass(frozen=True)
class SetResults:
    """Results of a set, the same on every rank."""

    evaluated: EvaluationSet
    prompts: Sequence[Prompt]
    results: Sequence[PromptResults]
    """Samples of each prompt, in the order of the prompts."""

    def scores(self) -> Scores:
        """Returns the metrics of each prompt, see `prompt_scores`."""
        return prompt_scores(self.results, self.evaluated.ks, self.evaluated.pass_threshold)


def evaluation_sets(config: Config) -> list[EvaluationSet]:
    """Returns the sets of `data.test`, with the values of `evaluation` and `rollout` where a set has none."""
    test = config.data.test
    if test is None:
        return []
    sets = test if isinstance(test, dict) else {"": EvaluationSetConfig(path=test)}
    return [_evaluation_set(name, of_set, config) for name, of_set in sets.items()]


def _evaluation_set(name: str, of_set: EvaluationSetConfig, config: Config) -> EvaluationSet:
    def value(key: str) -> Any:
        chain = (getattr(of_set, key), getattr(config.evaluation, key), getattr(config.rollout, key, None))
        return next((value for value in chain if value is not None), None)

    key = f"data.test.{name}" if name else "evaluation"
    samples = value("samples")
    ks = tuple(value("k") or default_ks(samples))
    sampling = {field: value(field) for field in ("temperature", "top_p", "max_new_tokens")}
    sampling["stop"] = tuple(value("stop"))
    if samples > 1 and sampling["temperature"] == 0:
        raise UserError(
            f"{key}.temperature: greedy samples of a prompt are identical, and there are {samples}. Write a "
            f"temperature such as 0.6, or {key}.samples=1."
        )
    if ks and max(ks) > samples:
        raise UserError(
            f"{key}.k: {max(ks)} tries of a prompt that has {samples} samples. Write {key}.samples={max(ks)} or more."
        )
    return EvaluationSet(name, value("prompts"), samples, sampling, ks, value("pass_threshold"))


def evaluate(
    rollout: RolloutSource,
    reward: RewardRole,
    prompts: Iterable[Prompt],
    sets: Sequence[EvaluationSet],
    agent_names: Sequence[str] = (),
) -> list[SetResults]:
    """Evaluates the policy; all ranks call it together. Sets with equal sampling are generated at the same time.

    `prompts` are of all sets, each with the name of its set as its source; `agent_names` is of the job.
    """
    chosen: dict[str, list[Prompt]] = {of_set.name: [] for of_set in sets}
    limits = {of_set.name: of_set.prompts for of_set in sets}
    for prompt in prompts:
        limit = limits[prompt.source]
        if limit is None or len(chosen[prompt.source]) < limit:
            chosen[prompt.source].append(prompt)
    results: dict[int, PromptResults] = {}
    # One call for sets that are sampled alike: at the end of each call engines wait for the longest samples.
    for samples, sampling in {(s.samples, tuple(s.sampling.items())): None for s in sets}:
        together = [s for s in sets if (s.samples, tuple(s.sampling.items())) == (samples, sampling)]
        of_call = [prompt for of_set in together for prompt in chosen[of_set.name]]
        batch = rollout.generate_for_eval(of_call, samples, **dict(sampling))
        batch["reward"] = reward.wait(batch)
        results |= _gather_results(batch, agent_names)
    return [
        SetResults(of_set, chosen[of_set.name], [results[prompt.id] for prompt in chosen[of_set.name]])
        for of_set in sets
    ]


def _gather_results(batch: Batch, agent_names: Sequence[str]) -> dict[int, PromptResults]:
    """Gathers the results of all ranks, by prompt; samples are in the order of their ids.

    A sample of agents with names has their mean reward and the answer of the first, and the parts agent/NAME and
    agent/NAME/PART.
    """
    samples = batch.one_per_trajectory()
    columns = [all_gather_column(samples, name).tolist() for name in ("prompt_id", "reward", "answer")]
    agents = all_gather_column(samples, "agent").tolist() if agent_names else [0] * len(columns[0])
    episodes = without_agent(all_gather_column(samples, "trajectory")).tolist()
    parts = {
        name.removeprefix(PART): all_gather_column(samples, name).tolist()
        for name in samples.names()
        if name.startswith(PART)
    }
    results: dict[int, PromptResults] = {}
    parts_of: dict[int, list[dict[str, float]]] = {}  # of each sample of a prompt
    rows_of: dict[int, list[int]] = {}
    for i, episode in enumerate(episodes):
        rows_of.setdefault(episode, []).append(i)
    prompts, rewards, answers = columns
    for rows in rows_of.values():
        prompt, answer = prompts[rows[0]], answers[rows[0]]
        result = results.setdefault(prompt, PromptResults(prompt, [], [], {}))
        result.rewards.append(fmean(rewards[i] for i in rows))
        result.answers.append(None if answer == NO_ANSWER else str(answer))
        of_sample: dict[str, float] = {}
        for i in rows:
            agent = f"agent/{agent_names[agents[i]]}" if agent_names else ""
            if agent:
                of_sample[agent] = rewards[i]
            for part, values in parts.items():
                if not math.isnan(values[i]):
                    of_sample[f"{agent}/{part}" if agent else part] = values[i]
        parts_of.setdefault(prompt, []).append(of_sample)
    for prompt, of_samples in parts_of.items():
        names = dict.fromkeys(name for of_sample in of_samples for name in of_sample)
        results[prompt].parts.update({name: [of_sample.get(name) for of_sample in of_samples] for name in names})
    return results


def metrics_of(results: Sequence[SetResults]) -> dict[str, float]:
    """Returns the metrics of an evaluation in training.

    `eval/NAME`, with a name of `prompt_scores`, is the mean over the prompts of all sets, for metrics that all sets
    have; `eval/samples_with/PART` is the number of samples with a part that not all have. With several sets, each has
    its metrics under `eval/SET/`.
    """
    by_set = {of_set.evaluated.name: of_set.scores() for of_set in results}
    first, *others = by_set.values()
    common = {name: [first[name], *(s[name] for s in others)] for name in first if all(name in s for s in others)}
    metrics = _logged("eval", common, samples_with([result for of_set in results for result in of_set.results]))
    for of_set in sorted(results, key=lambda of_set: of_set.evaluated.name) if others else ():
        name = of_set.evaluated.name
        scores = {metric: [values] for metric, values in by_set[name].items()}
        metrics |= _logged(f"eval/{name}", scores, samples_with(of_set.results))
    return metrics


def _logged(prefix: str, scores: Mapping[str, Sequence[Tensor]], counts: Mapping[str, int]) -> dict[str, float]:
    metrics = {f"{prefix}/{name}": float(known(torch.cat(list(parts))).mean()) for name, parts in scores.items()}
    return metrics | {
        f"{prefix}/samples_with/{part}": float(count) for part, count in counts.items() if f"reward/{part}" in scores
    }
