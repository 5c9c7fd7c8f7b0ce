"""Progress of a run: remaining time, and the summary at the end."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta

METRICS = "metrics.jsonl"

Line = Mapping[str, float | None]  # metrics of one step

# Number of latest iterations in the estimate: response lengths change while a policy learns.
WINDOW = 10


class EtaEstimator:
    """Estimates the time until iteration `total` is done, of which `done` ones were done before."""

    def __init__(self, total: int, done: int = 0) -> None:
        self._total, self._done = total, done
        self._since = time.monotonic()
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def update(self, done: int) -> None:
        """Records that `done` iterations are done now."""
        now = time.monotonic()
        if done > self._done:
            self._seconds.append((now - self._since) / (done - self._done))
        self._done, self._since = done, now

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end, by the median of the latest iterations; None before the first one is done."""
        if not self._seconds:
            return None
        expected = statistics.median(self._seconds) * max(self._total - self._done, 0)
        return max(0.0, expected - (time.monotonic() - self._since)) if expected else 0.0


def format_seconds(seconds: float) -> str:
    """Formats seconds as 1:02:03, or 2 days, 1:02:03."""
    return str(timedelta(seconds=round(seconds)))


def summary(lines: Sequence[Line]) -> str:
    """Summarizes the metrics of a run in a few lines; metrics that the run does not have are omitted."""
    iterations = [line for line in lines if line["step"]]  # step 0 is the evaluation before training
    seconds = sum(value for _, value in _points(iterations, "time/iteration"))
    text = [f"{len(iterations)} {'iteration' if len(iterations) == 1 else 'iterations'} in {format_seconds(seconds)}"]
    if rates := [value for _, value in _points(iterations, "time/tokens_per_second")]:
        tokens = sum(rate * time for rate, (_, time) in zip(rates, _points(iterations, "time/iteration"), strict=True))
        text.append(f"tokens/s  {tokens / seconds:.0f} on average")
    if rewards := _points(iterations, "reward/mean"):
        (first, first_value), (last, last_value) = rewards[0], rewards[-1]
        best, highest = max(rewards, key=lambda point: point[1])
        text.append(
            f"reward    {first_value:.4g} in iteration {first}, {last_value:.4g} in {last}; "
            f"best {highest:.4g} in {best}"
        )
    if evaluations := _points(lines, "eval/reward"):
        (first, first_value), (last, last_value) = evaluations[0], evaluations[-1]
        text.append(f"eval      {first_value:.4g} in iteration {first} -> {last_value:.4g} in {last}")
    return "\n".join(text)


def _points(lines: Sequence[Line], name: str) -> list[tuple[int, float]]:
    """Returns (step, value) of the lines that have the metric."""
    return [(int(line["step"] or 0), value) for line in lines if (value := line.get(name)) is not None]
