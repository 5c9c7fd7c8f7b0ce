"""Time per phase of the iterations: the table over all ranks, and the timeline of each rank for `verl-mg view`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from verl_mg.distributed.collectives import all_gather_json
from verl_mg.jsonl import keep_before
from verl_mg.phase_timer import COMPUTE_PHASES, WAIT, PhaseTimer

log = logging.getLogger(__name__)

INEXACT = "A phase can include waiting for the work of another one; profile.synchronize=true separates them."
WARMUP_ITERATIONS = 1
"""First iterations, which are excluded where there are more: they include planning and compilation."""


class Profile:
    """Sums the phases of a timer over the iterations."""

    def __init__(self, timer: PhaseTimer) -> None:
        self._timer = timer
        self._sums: dict[str, float] = {}
        self._iterations = 0
        self.discard()

    def iteration(self) -> dict[str, float]:
        """Returns the metrics `time/phase/NAME` of the iteration that ends now, on this rank."""
        seconds = self._timer.take()
        if self._iterations == WARMUP_ITERATIONS:  # there are more iterations, so the first ones do not count
            self._sums = {}
        for phase, value in seconds.items():
            self._sums[phase] = self._sums.get(phase, 0.0) + value
        self._iterations += 1
        return {f"time/phase/{phase}": value for phase, value in sorted(seconds.items())}

    def discard(self) -> None:
        """Discards the time since the last iteration (evaluation, logging)."""
        self._timer.take()

    def table(self, exact: bool = True) -> str:
        """Returns the table of phases over all ranks, "" where no iteration was done; collective."""
        # Without `exact`, where the timer does not synchronize phases, the table says so.
        counted = self._iterations - WARMUP_ITERATIONS if self._iterations > WARMUP_ITERATIONS else self._iterations
        ranks = all_gather_json({phase: value / counted for phase, value in self._sums.items()})
        if not any(ranks):
            return ""
        return format_table(ranks) if exact else f"{format_table(ranks)}\n{INEXACT}"


def format_table(ranks: list[Mapping[str, float]]) -> str:
    """Formats a table of phases, by the mean seconds per iteration of each rank."""
    # The means add up to the iteration, since every wait is a phase too.
    columns = {phase: [rank.get(phase, 0.0) for rank in ranks] for phase in {phase for rank in ranks for phase in rank}}
    means = {phase: sum(column) / len(ranks) for phase, column in columns.items()}
    total = sum(means.values())
    width = max(map(len, ("total", *columns))) + 2
    lines = [f"{'phase':<{width}}{'mean s':>10}{'max s':>10}{'share':>9}"]
    for phase in sorted(means, key=lambda phase: (-means[phase], phase)):
        lines.append(f"{phase:<{width}}{means[phase]:>10.3f}{max(columns[phase]):>10.3f}{means[phase] / total:>9.1%}")
    # Not the sum of the column: another rank may be the slowest one in each phase.
    slowest = max(sum(rank.values()) for rank in ranks)
    lines.append(f"{'total':<{width}}{total:>10.3f}{slowest:>10.3f}{1:>9.1%}")
    compute = sum(mean for phase, mean in means.items() if phase in COMPUTE_PHASES)
    waits = sum(mean for phase, mean in means.items() if phase.startswith(WAIT))
    overhead = total - compute - waits
    lines.append(
        f"compute ({', '.join(COMPUTE_PHASES)}) {compute / total:.1%}, waiting for other ranks {waits / total:.1%}, "
        f"overhead {overhead:.3f} of {total:.3f} s, {overhead / total:.1%} of an iteration"
    )
    return "\n".join(lines)


class Timeline:
    """Writes the phases of this rank: `{"iteration": 3, "start": <Unix seconds>, "spans": [["update", 0.0, 1.2]]}`."""

    # An iteration starts where the line of the previous one was written, so evaluation and logging belong to it.

    def __init__(self, folder: str | Path, rank: int, timer: PhaseTimer, first_step: int | None = None) -> None:
        self._path, self._timer, self._failed = Path(folder) / f"rank-{rank}.jsonl", timer, False
        self._begin()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                keep_before(self._path, "iteration", first_step)
        except OSError as error:
            self._disable(error)

    def write(self, iteration: int) -> None:
        """Writes the line of an iteration that is done."""
        start, zero = self._start, self._zero
        spans = [
            (phase, round(begin - zero, 6), round(end - zero, 6)) for phase, begin, end in self._timer.take_spans()
        ]
        self._begin()
        if self._failed:
            return
        line = json.dumps({"iteration": iteration, "start": start, "spans": spans})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            self._disable(error)

    def _begin(self) -> None:
        # Two clocks: ranks are compared by the time of day, and durations must not change when that is corrected.
        self._start, self._zero = time.time(), time.perf_counter()
        self._timer.take_spans()

    def _disable(self, error: OSError) -> None:
        self._failed = True
        log.warning("%s: the timeline of this rank ends here (%s)", self._path, error.strerror or error)
