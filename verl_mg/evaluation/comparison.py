"""Comparison of two evaluations, prompt by prompt.

    scores of four prompts  first 0, 0, 1, 1    second 0, 1, 1, 1    differences 0, 1, 0, 0

The test is on the mean of the differences, 0.25: what makes a prompt hard for both models does not count as noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from verl_mg.algorithms.intervals import mean_interval, paired_p_value
from verl_mg.errors import UserError
from verl_mg.evaluation.results import StoredEvaluation, interval, table
from verl_mg.jsonl import StoredRecord

# Keys of a set's report that two evaluations usually share.
SETTINGS = ("samples", "sampling", "pass_threshold", "reward")


class Difference(StoredRecord):
    """Difference of a metric between two evaluations."""

    first: float  # mean of the first evaluation
    second: float  # mean of the second evaluation
    difference: float  # the second less the first
    low: float | None  # lower end of the interval of the difference; None for a single prompt
    high: float | None  # upper end
    p_value: float  # probability of so large a difference if both models are equally good


class Comparison(StoredRecord):
    """Differences of all metrics that both evaluations have."""

    first: str  # folder of the first evaluation
    second: str  # folder of the second evaluation
    sets: dict[str, dict[str, Difference]]  # differences by set and metric
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
    other: dict[str, dict[str, Any]] = {}
    for name in shared:
        _check_prompts(name, a, b)
        before, after = a.scores(name), b.scores(name)
        sets[name] = {metric: _difference(before[metric], after[metric]) for metric in before if metric in after}
        reports = [evaluation.report.sets[name].model_dump(mode="json") for evaluation in (a, b)]
        changed = {key: [report[key] for report in reports] for key in SETTINGS if reports[0][key] != reports[1][key]}
        other |= {name: changed} if changed else {}
    return Comparison(first=str(first), second=str(second), sets=sets, other_settings=other)


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
    return "\n".join([table(header, rows), *(["", "settings that differ:", *remarks] if remarks else [])])


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
