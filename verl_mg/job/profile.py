"""Where the time of a job's iterations went, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from verl_mg.clock import COMPUTING, WAITING, Clock
from verl_mg.megatron.collectives import all_gather_json

FIRST = 1
"""Iterations that are left out where there are more: what is planned or compiled once falls into them."""


class Profile:
    """The phases of a clock, iteration by iteration."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._iterations: list[dict[str, float]] = []
        self.leave_out()

    def iteration(self) -> dict[str, float]:
        """Of the iteration that ends here, on this rank: `time/phase/NAME`."""
        seconds = self._clock.take()
        self._iterations.append(seconds)
        return {f"time/phase/{phase}": value for phase, value in sorted(seconds.items())}

    def leave_out(self) -> None:
        """What was done since the last iteration is none of the next one's."""
        self._clock.take()

    def table(self) -> str:
        """A line a phase, and how much of an iteration is around the models' own work; all ranks call it together."""
        kept = self._iterations[FIRST:] or self._iterations
        own: dict[str, float] = {}
        for seconds in kept:
            for phase, value in seconds.items():
                own[phase] = own.get(phase, 0.0) + value / len(kept)
        return written(all_gather_json(own))


def written(ranks: list[Mapping[str, float]]) -> str:
    """The table of the mean seconds of an iteration on each rank."""
    phases = {phase for own in ranks for phase in own}
    columns = {phase: [own.get(phase, 0.0) for own in ranks] for phase in phases}
    whole = sum(sum(column) for column in columns.values()) / len(ranks)
    lines = [f"{'phase':<12}{'mean s':>10}{'most s':>10}{'share':>9}"]
    for phase in sorted(phases, key=lambda phase: (-sum(columns[phase]), phase)):
        mean = sum(columns[phase]) / len(ranks)
        lines.append(f"{phase:<12}{mean:>10.3f}{max(columns[phase]):>10.3f}{mean / whole:>9.1%}")
    around = whole - sum(sum(columns.get(phase, [])) for phase in (*COMPUTING, WAITING)) / len(ranks)
    lines.append(
        f"around {', '.join(COMPUTING)}, and waiting for ranks that do these: {around:.3f} of {whole:.3f} s, "
        f"{around / whole:.1%} of an iteration"
    )
    return "\n".join(lines)
