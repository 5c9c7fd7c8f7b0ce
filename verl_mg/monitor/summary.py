"""What a run tells at its end: how it went, from the metrics that it wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_mg.monitor.eta import format_seconds

METRICS = "metrics.jsonl"

Line = Mapping[str, float | None]


def summary(lines: Sequence[Line]) -> str:
    """A few lines; those of metrics that the run lacks are left out."""
    iterations = [line for line in lines if line["step"]]
    seconds = sum(value for _, value in _points(iterations, "time/iteration"))
    told = [f"{len(iterations)} {'iteration' if len(iterations) == 1 else 'iterations'} in {format_seconds(seconds)}"]
    if rates := [value for _, value in _points(iterations, "time/tokens_per_second")]:
        tokens = sum(rate * time for rate, (_, time) in zip(rates, _points(iterations, "time/iteration"), strict=True))
        told.append(f"tokens/s  {tokens / seconds:.0f} in the mean")
    if rewards := _points(iterations, "reward/mean"):
        (first, began), (last, ended) = rewards[0], rewards[-1]
        best, highest = max(rewards, key=lambda point: point[1])
        told.append(f"reward    {began:.4g} at {first}, {ended:.4g} at {last}; best {highest:.4g} at {best}")
    if evaluations := _points(lines, "eval/reward"):
        (first, began), (last, ended) = evaluations[0], evaluations[-1]
        told.append(f"eval      {began:.4g} at {first} -> {ended:.4g} at {last}")
    return "\n".join(told)


def _points(lines: Sequence[Line], name: str) -> list[tuple[int, float]]:
    """(step, value) where there is one."""
    return [(int(line["step"] or 0), value) for line in lines if (value := line.get(name)) is not None]
