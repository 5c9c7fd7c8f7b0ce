"""Files that an evaluation writes.

evaluation.json      model, and for each set how it was evaluated and its metrics with intervals
prompts.jsonl        rewards and answers of each prompt's samples, which comparisons are computed from
samples/000000/      every sample, in the format of a run's samples
config.yaml          the configuration
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_mg.algorithms.intervals import CONFIDENCE, mean_interval
from verl_mg.config import Config, Count
from verl_mg.data import Prompt
from verl_mg.errors import UserError
from verl_mg.job.prompt_scores import PromptResults, Scores, is_bounded, known, prompt_scores, samples_with
from verl_mg.jsonl import StoredRecord, replacing

if TYPE_CHECKING:
    from verl_mg.job.evaluation import SetResults

REPORT, PROMPTS = "evaluation.json", "prompts.jsonl"
EVALUATE_AGAIN = ". Evaluate again."  # remedy of a damaged file


class Metric(StoredRecord):
    """A mean over the prompts of a set, with its confidence interval."""

    value: float  # the mean
    standard_error: float | None  # standard error of the mean; None for a single prompt
    low: float | None  # lower end of the interval
    high: float | None  # upper end of the interval
    prompts: Count | None = None  # number of prompts whose samples have it, where not all samples do
    samples: Count | None = None  # number of samples that have it, of all prompts, where not all do


class SetReport(StoredRecord):
    """Sampling and scoring of a set, and its metrics."""

    path: str  # path or name of the data
    prompts: Count  # number of prompts
    samples: Count  # samples of each prompt
    sampling: dict[str, int | float | list[str]]  # sampling parameters
    k: tuple[int, ...]  # numbers of tries of pass@k and maj@k
    pass_threshold: float  # smallest reward of an answer that passes
    reward: dict[str, Any]  # reward functions and their options
    metrics: dict[str, Metric]  # metrics by name


class Report(StoredRecord):
    """Contents of evaluation.json."""

    model: str  # model or run, as the user has written it
    iteration: int | None  # iteration of the checkpoint; None for a model
    engine: str  # engine that generated the samples
    confidence: float  # probability with which an interval contains the expectation
    sets: dict[str, SetReport]  # sets by name


class PromptLine(StoredRecord):
    """Line of prompts.jsonl, of one prompt."""

    set: str  # name of the set
    prompt: Count  # id of the prompt in its evaluation
    record: str
    """Digest of the record that the prompt is from; prompts of one record may differ in template and instruction."""
    rewards: list[float]  # reward of each sample
    answers: list[str | None]  # key of the final answer of each sample, equal for equal answers
    parts: dict[str, list[float | None]]  # parts of the reward by name, each of all samples; null: has it not


def report_of(target: str, iteration: int | None, config: Config, results: Sequence[SetResults]) -> Report:
    """Returns the report of an evaluation of `target`, as the user has written it."""
    assert isinstance(config.data.test, dict)
    sets = {}
    for of_set in results:
        evaluated, section = of_set.evaluated, config.data.test[of_set.evaluated.name]
        reward = (section.reward or config.reward).model_dump(mode="json", include={"function", "options", "mixture"})
        sets[evaluated.name] = SetReport(
            path=str(section.path),
            prompts=len(of_set.prompts),
            samples=evaluated.samples,
            sampling={name: value for name, value in evaluated.sampling.items() if value != ()},
            k=evaluated.ks,
            pass_threshold=evaluated.pass_threshold,
            reward=reward,
            metrics=_metrics_of(of_set),
        )
    return Report(model=target, iteration=iteration, engine=config.rollout.engine, confidence=CONFIDENCE, sets=sets)


def _metrics_of(of_set: SetResults) -> dict[str, Metric]:
    counts = {f"reward/{part}": count for part, count in samples_with(of_set.results).items()}
    metrics = {}
    for name, values in of_set.scores().items():
        estimate = asdict(mean_interval(known(values), bounded=is_bounded(name)))
        prompts = len(known(values)) if name in counts else None
        metrics[name] = Metric(**estimate, prompts=prompts, samples=counts.get(name))
    return metrics


def write_results(folder: Path, report: Report, results: Sequence[SetResults]) -> None:
    """Writes the files evaluation.json and prompts.jsonl."""
    # evaluation.json is the last one, so that it is never without prompts.jsonl.
    lines = [
        PromptLine(
            set=of_set.evaluated.name,
            prompt=prompt.id,
            record=_digest(prompt),
            rewards=result.rewards,
            answers=result.answers,
            parts=result.parts,
        )
        for of_set in results
        for prompt, result in zip(of_set.prompts, of_set.results, strict=True)
    ]
    _write(folder / PROMPTS, "".join(f"{line.model_dump_json()}\n" for line in lines))
    _write(folder / REPORT, report.model_dump_json(indent=2) + "\n")


class StoredEvaluation:
    """An evaluation as its folder has it; UserError for any other folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report = Report.parse(_read(folder / REPORT), folder / REPORT, EVALUATE_AGAIN)
        lines = _read(folder / PROMPTS).splitlines()
        every = [
            PromptLine.parse(line, folder / f"{PROMPTS}:{i}", EVALUATE_AGAIN) for i, line in enumerate(lines, start=1)
        ]
        self.lines = {name: [line for line in every if line.set == name] for name in self.report.sets}
        """Lines of each set, in the order of its prompts."""

    def results(self, name: str) -> list[PromptResults]:
        """Returns the results of a set."""
        return [PromptResults(line.prompt, line.rewards, line.answers, line.parts) for line in self.lines[name]]

    def scores(self, name: str) -> Scores:
        """Returns the metrics of each prompt of a set."""
        # Computed again: the report has means, and a paired test needs each prompt.
        of_set = self.report.sets[name]
        return prompt_scores(self.results(name), of_set.k, of_set.pass_threshold)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns rows as text in columns, the first two of which are names."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(f"{text:{'<' if i < 2 else '>'}{widths[i]}}" for i, text in enumerate(line)).rstrip()
        for line in lines
    )


def format_report(report: Report) -> str:
    """Returns a report as a table."""
    rows = [
        [name, metric, f"{m.value:.4f}", interval(m.low, m.high), *_counted(m, of_set)]
        for name, of_set in report.sets.items()
        for metric, m in of_set.metrics.items()
    ]
    return table(["set", "metric", "mean", f"{report.confidence:.0%} interval", "prompts", "samples"], rows)


def _counted(metric: Metric, of_set: SetReport) -> tuple[str, str]:
    if metric.samples is None:
        return str(of_set.prompts), str(of_set.samples)
    return str(metric.prompts), f"{metric.samples} of {of_set.prompts * of_set.samples}"


def interval(low: float | None, high: float | None) -> str:
    """Returns an interval as text; "-" where there is none."""
    return "-" if low is None or high is None else f"{low:.4f} .. {high:.4f}"


def _digest(prompt: Prompt) -> str:
    # 12 bytes: two of a million records have the same digest with a probability of 6e-18.
    content: Mapping[str, Any] = prompt.record
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _write(path: Path, text: str) -> None:
    try:
        with replacing(path) as file:
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}). Choose another --output.") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read ({reason}). Give the folder of an evaluation.") from None
