"""Time of this rank by phase, each second counted once, and memory of its process.

Phases of the start: `launcher` up to the start of the process, `process`, `imports`, `rendezvous`, `configuration`,
`checks`, `data`, `models`, `rewards`, `engines`.

Phases of iterations: `generate`, `wait_generate`, `wait_reward`, `row_dispatch`, `forward`, `update`, `wait_update`,
`optimizer`, `role_compute`, `wait_role_compute`, `weight_sync`, `wait_weight_sync`, `logging`, `checkpoint`,
`evaluation`, and `other` for the rest of an iteration. `wait_NAME` is the wait for the phase NAME of other ranks.

    phases    0 s  [update    2 s [optimizer] 3 s     ] 4 s
    seconds   {"update": 3, "optimizer": 1}
    spans     ("update", 0, 2), ("optimizer", 2, 3), ("update", 3, 4)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from verl_mg import device
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch.distributed as dist
else:
    dist = lazy_import("torch.distributed")

COMPUTE_PHASES = ("generate", "forward", "update", "optimizer")
"""Phases in which models compute: generation, forward passes, forward and backward passes, optimizer steps."""
STATUS, RESET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WAIT = "wait_"  # prefix of the phases in which this rank waits for other ranks
Span = tuple[str, float, float]  # a phase with the times of its begin and end, in seconds of `time.perf_counter`
MAX_SPANS = 512  # maximum number of stored spans; beyond it the shorter half is dropped
MERGE_GAP_SECONDS = 1e-5  # maximum gap, in seconds, between two spans of one phase that are merged


class PhaseTimer:
    """Stopwatch with nested phases, of which an inner one pauses the outer; with `exact` the device is synchronized."""

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.seconds: dict[str, float] = {}  # seconds by phase since the last call of `take`
        self.progress = 0  # counter that grows with every change of phase; a rank on which it is constant has stalled
        self.memory: HostMemory | None = None  # where it is set, each change of phase reads the memory
        self._running: list[str] = []
        self._since = 0.0
        self._spans: list[Span] | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Counts the time inside the `with` block for the phase."""
        self._switch()
        self._running.append(phase)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    @property
    def phase(self) -> str:
        """Name of the innermost phase, "" outside of all; can be read from any thread."""
        return "".join(self._running[-1:])

    def barrier(self, name: str, group: dist.ProcessGroup | None = None) -> None:
        """Waits, if the timer is exact, until the ranks of a group have completed a phase; counted as `wait_NAME`."""
        if self.exact:
            with self(WAIT + name):
                dist.barrier(group)

    def take(self) -> dict[str, float]:
        """Returns the seconds by phase since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken

    def take_spans(self) -> list[Span]:
        """Returns the spans of the innermost phases since the last call, in order; recorded from the first call on."""
        taken, self._spans = self._spans or [], []
        return taken

    def _switch(self) -> None:
        if self.exact:
            device.synchronize()
        now = time.perf_counter()
        self.progress += 1
        if self._running:
            phase = self._running[-1]
            if self.memory:
                self.memory.count(phase)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
            if self._spans is not None:
                self._spans = _with_span(self._spans, (phase, self._since, now))
        self._since = now


class HostMemory:
    """Resident memory of this process by phase, with what a forked rank shares with others.

    bytes    {"update": (9000, 7000)}    9000 at most, 7000 at the end
    """

    def __init__(self) -> None:
        self.bytes: dict[str, tuple[int, int]] = {}

    def count(self, phase: str) -> None:
        """Counts the memory since the last call for a phase."""
        status = STATUS.read_text(encoding="ascii").splitlines()
        peak, kept = (int(line.split()[1]) * 1024 for line in status if line.startswith(("VmHWM:", "VmRSS:")))
        self.bytes[phase] = max(peak, self.bytes.get(phase, (0, 0))[0]), kept
        # Where it is not allowed, the largest memory of a phase is that up to its end.
        with suppress(OSError):
            RESET_PEAK.write_text("5", encoding="ascii")


def _with_span(spans: list[Span], new: Span) -> list[Span]:
    phase, begin, end = new
    if spans and spans[-1][0] == phase and begin - spans[-1][2] <= MERGE_GAP_SECONDS:
        spans[-1] = (phase, spans[-1][1], end)
    elif end > begin:
        spans.append(new)
    # Half of them, so that sorting is rare.
    if len(spans) <= MAX_SPANS:
        return spans
    longest_first = sorted(range(len(spans)), key=lambda i: spans[i][1] - spans[i][2])
    return [spans[i] for i in sorted(longest_first[: MAX_SPANS // 2])]
