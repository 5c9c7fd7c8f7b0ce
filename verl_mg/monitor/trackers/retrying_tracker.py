"""No tracker may stop training."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from verl_mg.monitor.trackers.tracker import Tracker

log = logging.getLogger(__name__)

AGAIN_AFTER = 60.0
PATIENCE = 10
"""A tracker that fails slowly is left alone for so many times the seconds that it took to fail."""


class RetryingTracker:
    """A tracker that may fail, at opening too: it is told once, and what it missed it is given when it works again."""

    def __init__(self, name: str, opened: Callable[[], Tracker], again_after: float = AGAIN_AFTER) -> None:
        """again_after: seconds to the next try."""
        self._name, self._opened, self._again_after = name, opened, again_after
        self._tracker: Tracker | None = None
        self._missed: deque[tuple[int, dict[str, float]]] = deque()
        self._warned = False
        self._not_before = 0.0
        self._give()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """See `Tracker`."""
        self._missed.append((step, dict(metrics)))
        if time.monotonic() >= self._not_before:
            self._give()

    def close(self) -> None:
        """See `Tracker`; a last try to give what was missed."""
        if self._missed:
            self._give()
        if self._missed:
            log.warning("%s: %d steps are missing there", self._name, len(self._missed))
        if self._tracker is not None:
            try:
                self._tracker.close()
            except Exception as error:
                self._warn(error)

    def _give(self) -> None:
        started = time.monotonic()
        try:
            if self._tracker is None:
                self._tracker = self._opened()
            while self._missed:
                self._tracker.log(*self._missed[0])
                self._missed.popleft()
        except Exception as error:
            self._warn(error)
            now = time.monotonic()
            self._not_before = now + max(self._again_after, PATIENCE * (now - started))

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            reason = (str(error).splitlines() or [""])[0]
            log.warning("%s fails, training goes on without it: %s: %s", self._name, type(error).__name__, reason)
        self._warned = True
