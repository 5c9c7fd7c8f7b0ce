"""Data of a run for the page. The run may still be running, and any of its files may be missing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from verl_mg.config.reading import read_tree
from verl_mg.errors import UserError
from verl_mg.jsonl import find_line, first_and_last, parse_line
from verl_mg.view.metrics import Metrics
from verl_mg.view.samples import Samples

CONFIG, METRICS, STATUS, TIMELINE, SAMPLES = "config.yaml", "metrics.jsonl", "status.json", "timeline", "samples"
MARKS = (CONFIG, METRICS, STATUS, TIMELINE, SAMPLES)  # every run has at least one of these
REPEATED = ("job.seed", "job.output")  # keys in which repetitions of a run differ


class Run:
    """The output folder of a job; UserError for any other folder."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder. Give the job.output of a run.")
        if not any((folder / mark).exists() for mark in MARKS):
            raise UserError(f"{folder}: not a run ({METRICS} is missing). Give the job.output of a run.")
        self.folder = folder
        self.name = folder.resolve().name
        self.configuration = read_configuration(folder / CONFIG)
        self.metrics = Metrics(folder / METRICS)
        self.samples = Samples(folder / SAMPLES)

    def about(self) -> dict[str, Any]:
        """Returns name and status of the run, its latest metrics, and the ranges of iterations with samples."""
        try:
            status = parse_line((self.folder / STATUS).read_bytes())
        except OSError:
            status = None
        self.metrics.update()
        return {
            "name": self.name,
            "folder": str(self.folder),
            "seed": self.configuration.get("job.seed"),
            "status": status or {},
            "metrics": self.metrics.latest(),
            "samples": _ranges(self.samples.index.iterations()),
            "timeline": self._timeline_ends(),
        }

    def timeline(self, iteration: int) -> list[dict[str, Any]]:
        """Returns for each rank of an iteration `rank`, `start` in Unix seconds, and `spans` of name, begin and end."""
        timelines = []
        for rank, path in sorted(self._timelines().items()):
            line = find_line(path, "iteration", iteration)
            if line is not None:
                timelines.append({"rank": rank, "start": line.get("start", 0.0), "spans": line.get("spans", [])})
        return timelines

    def _timeline_ends(self) -> list[int]:
        """Returns the first and the last iteration; [] without timelines."""
        # Of the lowest rank only: the others have the same iterations.
        timelines = self._timelines()
        ends = first_and_last(timelines[min(timelines)]) if timelines else None
        return [line.get("iteration", 0) for line in ends] if ends else []

    def _timelines(self) -> dict[int, Path]:
        files = (self.folder / TIMELINE).glob("rank-*.jsonl")
        return {int(match[1]): file for file in files if (match := re.fullmatch(r"rank-(\d+)\.jsonl", file.name))}


def _ranges(numbers: list[int]) -> list[list[int]]:
    """Returns the first and the last of each range of consecutive numbers: [[1, 3], [7, 7]] for 1, 2, 3, 7."""
    runs = (list(run) for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]))
    return [[run[0][1], run[-1][1]] for run in runs]


def read_configuration(file: Path) -> dict[str, Any]:
    """Returns the values of a configuration by dotted key; none where the file is missing or damaged."""
    try:
        return dict(_flatten("", read_tree(file)))
    except UserError:
        return {}


def _flatten(prefix: str, tree: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in tree.items():
        nested = isinstance(value, dict) and value
        pairs += _flatten(f"{prefix}{name}.", value) if nested else [(f"{prefix}{name}", value)]
    return pairs


def groups_of(configurations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns groups of runs with the same configuration: `runs`, their numbers; `differs`, values of other keys."""
    groups: list[tuple[dict[str, Any], list[int]]] = []
    for number, configuration in enumerate(configurations):
        compared = {key: value for key, value in configuration.items() if key not in REPEATED}
        if same := [runs for other, runs in groups if compared and other == compared]:
            same[0].append(number)
        else:
            groups.append((compared, [number]))
    keys = {key for compared, _ in groups for key in compared}
    changed = sorted(key for key in keys if any(other.get(key) != groups[0][0].get(key) for other, _ in groups))
    return [
        {"runs": runs, "differs": {key: str(compared[key]) for key in changed if key in compared}}
        for compared, runs in groups
    ]
