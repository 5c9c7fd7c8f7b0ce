"""How fast iterations go, and when the last one will be done."""

from __future__ import annotations

import statistics
import time
from collections import deque
from datetime import timedelta

WINDOW = 10
"""Iterations that are looked back on: lengths grow and shrink while a policy learns."""


class EtaEstimator:
    """total: the last iteration. done: those that were done before now."""

    def __init__(self, total: int, done: int = 0) -> None:
        self._total, self._done = total, done
        self._since = time.monotonic()
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def reached(self, done: int) -> None:
        """So many iterations are done now."""
        now = time.monotonic()
        if done > self._done:
            self._seconds.append((now - self._since) / (done - self._done))
        self._done, self._since = done, now

    @property
    def left(self) -> float | None:
        """Seconds to the end by the median of the latest iterations; None before the first of them is done."""
        if not self._seconds:
            return None
        expected = statistics.median(self._seconds) * max(self._total - self._done, 0)
        return max(0.0, expected - (time.monotonic() - self._since)) if expected else 0.0


def format_seconds(seconds: float) -> str:
    """1:02:03, or 2 days, 1:02:03."""
    return str(timedelta(seconds=round(seconds)))
