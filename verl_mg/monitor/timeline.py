"""When this rank did what, for `verl-mg view`."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from verl_mg.jsonl import keep_before
from verl_mg.phase_timer import PhaseTimer

log = logging.getLogger(__name__)


class Timeline:
    """One line an iteration: `{"iteration": 3, "start": 1763772193.4, "spans": [["generate", 0.0, 1.25], ...]}`.

    `start` is in Unix seconds, a span begins and ends so many seconds after it. An iteration starts where the one
    before it was written, so evaluation and logging belong to it. A disk that fails ends the time line, not the run.
    """

    def __init__(self, folder: str | Path, rank: int, timer: PhaseTimer, first_step: int | None = None) -> None:
        """Goes on after what `folder/rank-{rank}.jsonl` holds.

        Args:
            first_step: the iteration that is written next; lines from there on, written by a run that was killed
                after its last checkpoint, are taken out.
        """
        self._path, self._clock, self._failed = Path(folder) / f"rank-{rank}.jsonl", timer, False
        self._begin()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                keep_before(self._path, "iteration", first_step)
        except OSError as error:
            self._give_up(error)

    def write(self, iteration: int) -> None:
        """The iteration is over."""
        start, zero = self._start, self._zero
        spans = [
            (phase, round(begin - zero, 6), round(end - zero, 6)) for phase, begin, end in self._clock.take_spans()
        ]
        self._begin()
        if self._failed:
            return
        line = json.dumps({"iteration": iteration, "start": start, "spans": spans})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            self._give_up(error)

    def _begin(self) -> None:
        self._start, self._zero = time.time(), time.perf_counter()
        self._clock.take_spans()

    def _give_up(self, error: OSError) -> None:
        self._failed = True
        log.warning("%s: no time line of this rank from here on (%s)", self._path, error.strerror or error)
