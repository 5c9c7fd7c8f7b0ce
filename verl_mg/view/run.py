"""What the folder of a run tells the page. The run may still be going on, and any of its files be missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from verl_mg.errors import UserError
from verl_mg.view import lines
from verl_mg.view.samples import Samples

METRICS, STATUS, TIMELINE, SAMPLES = "metrics.jsonl", "status.json", "timeline", "samples"
MARKS = ("config.yaml", METRICS, STATUS, TIMELINE, SAMPLES)
"""One of these is in the folder of every run."""


class Run:
    """A folder that a job has written. UserError where it is none."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; give the one that job.output of a run named")
        if not any((folder / mark).exists() for mark in MARKS):
            raise UserError(f"{folder}: holds no run (no {METRICS}); give the folder that job.output named")
        self.folder = folder
        self.name = folder.resolve().name
        self.samples = Samples(folder / SAMPLES)

    def about(self) -> dict[str, Any]:
        """Its name, where it stands, and the iterations of which samples and time lines are there."""
        try:
            status = lines.parse((self.folder / STATUS).read_bytes())
        except OSError:
            status = None
        return {
            "name": self.name,
            "folder": str(self.folder),
            "status": status or {},
            "samples": self.samples.iterations(),
            "timeline": self._timeline_ends(),
        }

    def metrics(self, file: str, offset: int) -> dict[str, Any]:
        """See `lines.news`."""
        return lines.news(self.folder / METRICS, file, offset)

    def timeline(self, iteration: int) -> list[dict[str, Any]]:
        """What each rank did in an iteration: `rank`, `start` in Unix seconds, and `spans` of name, begin and end."""
        found = []
        for rank, path in sorted(self._timelines().items()):
            line = lines.line_of(path, "iteration", iteration)
            if line is not None:
                found.append({"rank": rank, "start": line.get("start", 0.0), "spans": line.get("spans", [])})
        return found

    def _timeline_ends(self) -> list[int]:
        """The first and the last iteration, or nothing."""
        timelines = self._timelines()
        ends = lines.ends(timelines[min(timelines)]) if timelines else None
        return [line.get("iteration", 0) for line in ends] if ends else []

    def _timelines(self) -> dict[int, Path]:
        files = (self.folder / TIMELINE).glob("rank-*.jsonl")
        return {int(found[1]): file for file in files if (found := re.fullmatch(r"rank-(\d+)\.jsonl", file.name))}
