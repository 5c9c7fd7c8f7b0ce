"""Metrics of a run in columns, as they are appended, and curves with as many points as the page has pixels."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_mg.jsonl import read_new_lines

BANDS = ("range", "error")
"""Bands around a mean of runs: from the least to the largest of them, or the standard error of the mean."""
DIGITS = 8  # significant digits of values in an answer
TINY = 1e-290  # smaller numbers are not rounded: the power of ten that scales them would exceed the range of float64


@dataclass(frozen=True)
class View:
    """Part of a curve that the page shows, and its resolution."""

    first: int | None = None  # first step; None for the first of all
    last: int | None = None  # last step; None for the last of all
    pixels: int = 400  # width; of each pixel, the least and the largest value are returned
    smoothing: float = 0.0  # weight of a step in the running mean relative to the next one; 0: none


@dataclass(frozen=True)
class Curve:
    """Values of a metric by step; NaN where a step has none."""

    steps: np.ndarray  # (n,) int64
    values: np.ndarray  # (n,) float64


class Metrics:
    """Columns of a file `metrics.jsonl` that may grow."""

    def __init__(self, file: Path) -> None:
        self._file, self._lock = file, threading.Lock()
        self._place: dict[str, Any] = {"file": "", "end": 0}
        self._columns: dict[str, tuple[array[int], array[float]]] = {}  # steps and values by name

    def update(self) -> None:
        """Reads new lines; all of them where a resumed run has replaced the file."""
        with self._lock:
            more = True
            while more:
                part = read_new_lines(self._file, self._place["file"], self._place["end"])
                if part["begin"] == 0:  # another file, or the first part of this one
                    self._columns = {}
                for line in part["lines"]:
                    self._add(line)
                self._place, more = part, part["more"]

    def latest(self) -> dict[str, Any]:
        """Returns `version`, which changes with each line, and `names`: the latest value of each metric by name."""
        with self._lock:
            latest = _rounded(np.array([values[-1] for _, values in self._columns.values()]))
            names = dict(zip(self._columns, latest, strict=True))
            return {"version": f"{self._place['file']}:{self._place['end']}", "names": names}

    def curve(self, name: str) -> Curve:
        """Returns all values of a metric; none where there is no such metric."""
        with self._lock:
            steps, values = self._columns.get(name, ((), ()))
            return Curve(np.array(steps, np.int64), np.array(values, np.float64))

    def _add(self, line: dict[str, Any]) -> None:
        # `_shown` multiplies differences of steps by pixels, up to 8000: with these bounds the product fits into int64.
        step = line.get("step")
        if type(step) is not int or abs(step) >= 2**48:
            return
        for name, value in line.items():
            if name != "step" and type(value) in (int, float, type(None)):
                steps, values = self._columns.setdefault(name, (array("q"), array("d")))
                steps.append(step)
                values.append(float("nan") if value is None else value)


def smoothed(curve: Curve, weight: float) -> Curve:
    """Returns the running mean in which a step counts `weight` times the next one; missing values remain missing."""
    if not weight:
        return curve
    total = count = 0.0
    means = curve.values.tolist()
    for place, value in enumerate(means):
        if value == value:  # not NaN
            total, count = total * weight + value, count * weight + 1
            means[place] = total / count
    return Curve(curve.steps, np.array(means, np.float64))


def points(curve: Curve, view: View) -> dict[str, list[Any]]:
    """Returns the `steps`, `values` and `smooth` values of a curve that the page shows."""
    # Smoothed before points are chosen, so that the mean does not depend on the width of the page.
    smooth = smoothed(curve, view.smoothing)
    shown = _shown(curve.steps, [curve.values, smooth.values], view)
    return {
        "steps": curve.steps[shown].tolist(),
        "values": _rounded(curve.values[shown]),
        "smooth": _rounded(smooth.values[shown]),
    }


def band(curves: Sequence[Curve], view: View, kind: str) -> dict[str, list[Any]]:
    """Returns the `steps`, the mean `values` of runs, and the `low` and `high` end of their band."""
    # Each curve is smoothed first; at each step the runs that have a value count.
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    table = np.full((len(curves), len(steps)), np.nan)
    for row, curve in enumerate(curves):
        table[row, np.searchsorted(steps, curve.steps)] = smoothed(curve, view.smoothing).values
    known = np.isfinite(table)
    count = known.sum(0)
    filled = np.where(known, table, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(count > 0, filled.sum(0) / count, np.nan)
        squares = np.where(known, (table - mean) ** 2, 0.0).sum(0)
        error = np.where(count > 1, np.sqrt(squares / (count - 1) / count), 0.0)
    low, high = mean - error, mean + error
    if kind == "range":
        low = np.where(count > 0, np.where(known, table, np.inf).min(0), np.nan)
        high = np.where(count > 0, np.where(known, table, -np.inf).max(0), np.nan)
    shown = _shown(steps, [mean, low, high], view)
    named = {"values": mean, "smooth": mean, "low": low, "high": high}
    return {"steps": steps[shown].tolist()} | {name: _rounded(values[shown]) for name, values in named.items()}


def _shown(steps: np.ndarray, columns: Sequence[np.ndarray], view: View) -> np.ndarray:
    """Returns the indices of the points that are shown: both ends, and of each pixel the extremes of each column."""
    # Steps 0 to 9 with values 0 1 2 3 4 5 4 3 2 1 in two pixels: pixel 0 (0 to 4) has the extremes 0 and 4, pixel 1 (5
    # to 9) the extremes 5 and 1, so the points 0, 4, 5 and 9 remain.
    inside = np.ones(len(steps), bool)
    if view.first is not None:
        inside &= steps >= view.first
    if view.last is not None:
        inside &= steps <= view.last
    places = np.flatnonzero(inside)
    if len(places) <= 2 * view.pixels:
        return places
    width = int(steps[places].max() - steps[places].min()) + 1
    pixel = (steps[places] - steps[places].min()) * view.pixels // width
    chosen = [places[:1], places[-1:]]
    for column in columns:
        known = np.isfinite(column[places])
        values, pixels, sources = column[places][known], pixel[known], places[known]
        # Sorted by pixel, then value: the extremes of a pixel are next to the changes of the pixel.
        order = np.lexsort((values, pixels))
        change = np.flatnonzero(np.diff(pixels[order])) + 1
        if len(order):
            chosen += [
                sources[order[np.concatenate([[0], change])]],
                sources[order[np.concatenate([change - 1, [-1]])]],
            ]
    return np.unique(np.concatenate(chosen))


def every(curve: Curve, first: int, stride: int) -> dict[str, list[Any]]:
    """Returns the `steps` and `values` of a curve at each `stride`-th step from `first` on."""
    shown = (curve.steps >= first) & ((curve.steps - first) % stride == 0)
    return {"steps": curve.steps[shown].tolist(), "values": _rounded(curve.values[shown])}


def _rounded(values: np.ndarray) -> list[float | None]:
    """Returns numbers with DIGITS digits, None for numbers that are not finite, which JSON does not have."""
    known = np.isfinite(values) & (np.abs(values) > TINY)
    exponent = np.zeros(len(values))
    exponent[known] = DIGITS - 1 - np.floor(np.log10(np.abs(values[known])))
    scale = 10.0 ** np.clip(exponent, -300, 300)
    rounded = np.where(known, np.round(np.where(known, values, 0.0) * scale) / scale, values)
    return [value if value - value == 0 else None for value in rounded.tolist()]
