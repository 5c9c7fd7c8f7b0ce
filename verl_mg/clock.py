"""Where the time of this rank goes: seconds by phase, each second counted once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

COMPUTING = ("generate", "forward", "update", "optimizer")
"""Phases of the models' own work: generation, forward passes that judge, forward and backward passes, what clears and
checks gradients and takes Adam's step."""
WAITING = "waiting"
"""For ranks that compute."""


class Clock:
    """Phases may be nested: inside an inner one the outer one stands still.

    exact: wait for the device at each end of a phase, and for the other ranks where a phase is over on all of them, so
    that a phase's seconds are those of its own work.
    """

    def __init__(self, exact: bool = False) -> None:
        self._exact = exact
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = 0.0

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

    def meet(self, group: dist.ProcessGroup | None = None) -> None:
        """Where the other ranks' work has to be over too."""
        if self._exact:
            with self(WAITING):
                dist.barrier(group)

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken

    def _switch(self) -> None:
        if self._exact and torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._running:
            phase = self._running[-1]
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now
