"""Where the time of this rank goes: seconds by phase, each second counted once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

COMPUTE_PHASES = ("generate", "forward", "update", "optimizer")
"""Phases of the models' own work: generation, forward passes that judge, forward and backward passes, what clears and
checks gradients and takes Adam's step."""
WAITING = "waiting"
"""For ranks that compute."""
Span = tuple[str, float, float]
"""A phase, and when it began and ended: seconds of `time.perf_counter`."""
MAX_SPANS = 512
"""That are kept; of more, the longer half."""
MERGE_GAP_SECONDS = 1e-5
"""Seconds between two spans of one phase that make one."""


class PhaseTimer:
    """Phases may be nested: inside an inner one the outer one stands still.

    exact: wait for the device at each end of a phase, and for the other ranks where a phase is over on all of them, so
    that a phase's seconds are those of its own work.

    ticks: grows as work goes on, with every switch; a rank whose clock does not tick stands still.
    """

    def __init__(self, exact: bool = False) -> None:
        self._exact = exact
        self.seconds: dict[str, float] = {}
        self.progress = 0
        self._running: list[str] = []
        self._since = 0.0
        self._spans: list[Span] | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Inside, time counts for the phase."""
        self._switch()
        self._running.append(phase)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    @property
    def phase(self) -> str:
        """The innermost one now, empty outside of all; any thread may ask."""
        return "".join(self._running[-1:])

    def meet(self, group: dist.ProcessGroup | None = None) -> None:
        """Where the other ranks' work has to be over too."""
        if self._exact:
            with self(WAITING):
                dist.barrier(group)

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken

    def take_spans(self) -> list[Span]:
        """The spans since the last call, in order, those of the innermost phase; kept from the first call on."""
        taken, self._spans = self._spans or [], []
        return taken

    def _switch(self) -> None:
        if self._exact and torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.progress += 1
        if self._running:
            phase = self._running[-1]
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
            if self._spans is not None:
                self._spans = _with_span(self._spans, (phase, self._since, now))
        self._since = now


def _with_span(spans: list[Span], new: Span) -> list[Span]:
    phase, begin, end = new
    if spans and spans[-1][0] == phase and begin - spans[-1][2] <= MERGE_GAP_SECONDS:
        spans[-1] = (phase, spans[-1][1], end)
    elif end > begin:
        spans.append(new)
    if len(spans) <= MAX_SPANS:
        return spans
    longest_first = sorted(range(len(spans)), key=lambda i: spans[i][1] - spans[i][2])
    return [spans[i] for i in sorted(longest_first[: MAX_SPANS // 2])]
