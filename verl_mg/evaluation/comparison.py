"""Comparison of two evaluations, prompt by prompt.

    scores of four prompts  first 0, 0, 1, 1    second 0, 1, 1, 1    differences 0, 1, 0, 0

The test is on the mean of the differences, 0.25: what makes a prompt hard for both models does not count as noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_mg.algorithms.intervals import mean_interval, paired_p_value
from verl_mg.errors import UserError
from verl_mg.evaluation.results import StoredEvaluation, interval, table
from verl_mg.job.prompt_scores import PromptResults, part_counts
from verl_mg.jsonl import StoredRecord

if TYPE_CHECKING:
    from torch import Tensor

# Keys of a set's report that two evaluations usually share.
SETTINGS = ("samples", "sampling", "pass_threshold", "reward")


class Difference(StoredRecord):
    """Difference of a metric between two evaluations, over the prompts that have it in both."""

    first: float  # mean of the first evaluation
    second: float  # mean of the second evaluation
    difference: float  # the second less the first
    low: float | None  # lower end of the interval of the difference; None for a single prompt
    high: float | None  # upper end
    p_value: float  # probability of so large a difference if both models are equally good


class Partial(StoredRecord):
    """Counts of a part of the reward that not all samples of two evaluations have."""

    first: int  # samples of the first evaluation that have it
    second: int  # samples of the second evaluation that have it
    prompts: int  # prompts that have it in both


class Comparison(StoredRecord):
    """Differences of all metrics that both evaluations have."""

    first: str  # folder of the first evaluation
    second: str  # folder of the second evaluation
    sets: dict[str, dict[str, Difference]]  # differences by set and metric
    samples_with: dict[str, dict[str, Partial]]  # counts by set and part, of parts that not all samples have
    other_settings: dict[str, dict[str, Any]]  # settings that differ, by set and key, as [first, second]


def compare(first: Path, second: Path) -> Comparison:
    """Compares two evaluations; UserError where they share no set, or a set has other prompts."""
    a, b = StoredEvaluation(first), StoredEvaluation(second)
    shared = [name for name in a.report.sets if name in b.report.sets]
    if not shared:
        raise UserError(
            f"{second}: its sets are {', '.join(b.report.sets)}, {first} has {', '.join(a.report.sets)}. "
            "Compare evaluations with a set of the same name."
        )
    sets: dict[str, dict[str, Difference]] = {}
    partial: dict[str, dict[str, Partial]] = {}
    other: dict[str, dict[str, Any]] = {}
    for name in shared:
        _check_prompts(name, a, b)
        before, after = a.scores(name), b.scores(name)
        pairs = {metric: _paired(before[metric], after[metric]) for metric in before if metric in after}
        sets[name] = {metric: _difference(*pair) for metric, pair in pairs.items() if len(pair[0])}
        partial[name] = _partial(a.results(name), b.results(name), pairs)
        reports = [evaluation.report.sets[name].model_dump(mode="json") for evaluation in (a, b)]
        changed = {key: [report[key] for report in reports] for key in SETTINGS if reports[0][key] != reports[1][key]}
        other |= {name: changed} if changed else {}
    return Comparison(first=str(first), second=str(second), sets=sets, samples_with=partial, other_settings=other)


def format_comparison(comparison: Comparison) -> str:
    """Returns a comparison as a table, and the settings that differ."""
    rows = [
        [
            *(name, metric, f"{d.first:.4f}", f"{d.second:.4f}", f"{d.difference:+.4f}"),
            *(interval(d.low, d.high), f"{d.p_value:.4f}"),
        ]
        for name, metrics in comparison.sets.items()
        for metric, d in metrics.items()
    ]
    header = ["set", "metric", "first", "second", "difference", "95% interval", "p"]
    remarks = [
        f"{name}.{key}: {values[0]} and {values[1]}"
        for name, changed in comparison.other_settings.items()
        for key, values in changed.items()
    ]
    counts = [
        f"{name} reward/{part}: {of_part.first} and {of_part.second} samples, {of_part.prompts} prompts in both"
        for name, of_set in comparison.samples_with.items()
        for part, of_part in of_set.items()
    ]
    lists = {"parts that not all samples have:": counts, "settings that differ:": remarks}
    return "\n".join([table(header, rows), *(line for title, of in lists.items() if of for line in ("", title, *of))])


def _paired(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scores of the prompts that have one in both."""
    both = ~(first.isnan() | second.isnan())
    return first[both], second[both]


def _partial(
    first: Sequence[PromptResults], second: Sequence[PromptResults], pairs: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, Partial]:
    counts = [part_counts(results) for results in (first, second)]
    every = [sum(len(result.rewards) for result in results) for results in (first, second)]
    partial = {}
    for part in dict.fromkeys([*counts[0], *counts[1]]):
        of_first, of_second = (of_part.get(part, 0) for of_part in counts)
        if (of_first, of_second) != tuple(every):
            prompts = len(pairs[f"reward/{part}"][0]) if f"reward/{part}" in pairs else 0
            partial[part] = Partial(first=of_first, second=of_second, prompts=prompts)
    return partial


def _difference(first: Tensor, second: Tensor) -> Difference:
    estimate = mean_interval(second - first)
    return Difference(
        first=float(first.mean()),
        second=float(second.mean()),
        difference=estimate.value,
        low=estimate.low,
        high=estimate.high,
        p_value=paired_p_value(second - first),
    )


def _check_prompts(name: str, a: StoredEvaluation, b: StoredEvaluation) -> None:
    # By records, not by texts: models with other chat templates have other prompts for a record.
    records = [[line.record for line in evaluation.lines[name]] for evaluation in (a, b)]
    if records[0] == records[1]:
        return
    common = len(set(records[0]) & set(records[1]))
    raise UserError(
        f"set {name}: {a.folder} has {len(records[0])} prompts, {b.folder} has {len(records[1])}, and {common} are of "
        f"the same records; a paired test needs the same prompts in the same order. Evaluate both with the same "
        f"data.test.{name}.path and data.test.{name}.prompts."
    )


def show_comparison(first: Path, second: Path, as_json: bool) -> None:
    """Prints the comparison of the evaluations in two folders."""
    comparison = compare(first, second)
    print(comparison.model_dump_json(indent=2) if as_json else format_comparison(comparison))
