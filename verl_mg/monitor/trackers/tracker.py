"""What every tracker promises."""

from __future__ import annotations

from typing import Protocol


class Tracker(Protocol):
    """Takes the metrics of iterations. `step` counts iterations done, so the first one logs step 1.

    first_step, where a tracker is opened with it, is the step that is logged next: in a run that goes on after a kill,
    what later steps have left is taken out, where that can be done.
    """

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write down the metrics of one iteration, at once."""

    def close(self) -> None:
        """Nothing is logged after this."""
