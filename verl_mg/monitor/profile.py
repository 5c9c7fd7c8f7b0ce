"""Where the time of a job's iterations went, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from verl_mg.distributed.collectives import all_gather_json
from verl_mg.phase_timer import COMPUTE_PHASES, WAIT, PhaseTimer

INEXACT = "a phase may hold the wait for work of another one: profile.synchronize=true tells them apart"
FIRST = 1
"""Iterations that are left out where there are more: what is planned or compiled once falls into them."""


class Profile:
    """The phases of a clock, iteration by iteration."""

    def __init__(self, timer: PhaseTimer) -> None:
        self._clock = timer
        self._sums: dict[str, float] = {}
        self._iterations = 0
        self.leave_out()

    def iteration(self) -> dict[str, float]:
        """Of the iteration that ends here, on this rank: `time/phase/NAME`."""
        seconds = self._clock.take()
        if self._iterations == FIRST:
            self._sums = {}
        for phase, value in seconds.items():
            self._sums[phase] = self._sums.get(phase, 0.0) + value
        self._iterations += 1
        return {f"time/phase/{phase}": value for phase, value in sorted(seconds.items())}

    def leave_out(self) -> None:
        """What was done since the last iteration is none of the next one's."""
        self._clock.take()

    def table(self, exact: bool = True) -> str:
        """A line a phase, and how much of an iteration is around the models' own work; all ranks call it together.

        "" where no iteration was done. exact: whether the clock was; otherwise the table says what that means.
        """
        counted = self._iterations - FIRST if self._iterations > FIRST else self._iterations
        ranks = all_gather_json({phase: value / counted for phase, value in self._sums.items()})
        if not any(ranks):
            return ""
        return format_table(ranks) if exact else f"{format_table(ranks)}\n{INEXACT}"


def format_table(ranks: list[Mapping[str, float]]) -> str:
    """The table of the mean seconds of an iteration on each rank."""
    phases = {phase for own in ranks for phase in own}
    columns = {phase: [own.get(phase, 0.0) for own in ranks] for phase in phases}
    whole = sum(sum(column) for column in columns.values()) / len(ranks)
    lines = [f"{'phase':<18}{'mean s':>10}{'most s':>10}{'share':>9}"]
    for phase in sorted(phases, key=lambda phase: (-sum(columns[phase]), phase)):
        mean = sum(columns[phase]) / len(ranks)
        lines.append(f"{phase:<18}{mean:>10.3f}{max(columns[phase]):>10.3f}{mean / whole:>9.1%}")
    computing = [column for phase, column in columns.items() if phase in COMPUTE_PHASES or phase.startswith(WAIT)]
    around = whole - sum(map(sum, computing)) / len(ranks)
    lines.append(
        f"around {', '.join(COMPUTE_PHASES)}, and waiting for ranks that do these: {around:.3f} of {whole:.3f} s, "
        f"{around / whole:.1%} of an iteration"
    )
    return "\n".join(lines)
