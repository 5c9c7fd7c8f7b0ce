"""The interface of trackers, and the wrapper that keeps a failing tracker from stopping the training.

    not open --- opened ---> open: each step is logged when it arrives
       |                        |
       +------ exception -------+---> pause: steps wait in `_missed`; the next `log` after it tries again,
                                      with the oldest step first

A tracker that waits delays the records of the next iteration, and so the training, hence the growing pause.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0  # pause after a failure
PAUSE_FACTOR = 10  # the pause is at least this many times the duration of the failed call


@dataclass(frozen=True)
class SampleTable:
    """Table with a row per sample, None where a sample has no value."""

    columns: tuple[str, ...]
    rows: list[list[str | float | None]]


class Tracker(Protocol):
    """Receives the metrics of iterations. When it opens, it removes later steps, which a killed run may have left."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes the metrics of one iteration immediately; `step` iterations are done."""

    def close(self) -> None:
        """Closes the tracker; nothing is logged afterwards."""


@runtime_checkable
class SampleTracker(Tracker, Protocol):
    """Tracker that also receives samples."""

    def log_samples(self, step: int, table: SampleTable) -> None:
        """Writes samples of one iteration immediately."""


class RetryingTracker:
    """Wrapper of a tracker that can fail: warns once, and logs the missed steps when the tracker works again."""

    # Not by tenacity: it would block training during the pauses, and has no queue of missed steps.

    def __init__(self, name: str, opener: Callable[[], Tracker], retry_after: float = RETRY_SECONDS) -> None:
        self._name, self._opener, self._retry_after = name, opener, retry_after
        self._tracker: Tracker | None = None
        self._missed: deque[tuple[int, dict[str, float], SampleTable | None]] = deque()
        self._warned = False
        self._not_before = 0.0
        self._flush()

    def log(self, step: int, metrics: dict[str, float], samples: SampleTable | None = None) -> None:
        """Logs the step, and missed ones, unless a failure was recent."""
        # A copy, since the step may be logged much later.
        self._missed.append((step, dict(metrics), samples))
        if time.monotonic() >= self._not_before:
            self._flush()

    def close(self) -> None:
        """Closes the tracker after a last attempt to log missed steps."""
        if self._missed:
            self._flush()
        if self._missed:
            log.warning("%s: %d steps are missing there", self._name, len(self._missed))
        if self._tracker is not None:
            try:
                self._tracker.close()
            except Exception as error:
                self._warn(error)

    def _flush(self) -> None:
        started = time.monotonic()
        try:
            if self._tracker is None:
                self._tracker = self._opener()
            while self._missed:
                step, metrics, samples = self._missed[0]
                self._tracker.log(step, metrics)
                if samples is not None and isinstance(self._tracker, SampleTracker):
                    self._tracker.log_samples(step, samples)
                self._missed.popleft()
        except Exception as error:  # a service may raise anything, and training continues
            self._warn(error)
            now = time.monotonic()
            self._not_before = now + max(self._retry_after, PAUSE_FACTOR * (now - started))

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            reason = (str(error).splitlines() or [""])[0]
            log.warning("%s fails, training continues without it: %s: %s", self._name, type(error).__name__, reason)
        self._warned = True
