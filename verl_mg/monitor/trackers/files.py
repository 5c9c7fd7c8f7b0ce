"""Trackers that write files: metrics.jsonl, TensorBoard events, the table of evaluations; and the plot of rewards."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from verl_mg.jsonl import keep_before, read_lines, replacing

SERIES = ("reward/mean", "eval/reward")  # metrics of the plot


class JsonlTracker:
    """Writes one line per step: `{"step": 3, "reward/mean": 0.25, ...}`; values that are not finite are null."""

    # Floats are written with all digits, so files can be compared bitwise.

    def __init__(self, path: str | Path, first_step: int | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            keep_before(path, "step", first_step)
        # Without a buffer, a line that does not fit on the disk is not written a second time later.
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        line = {"step": step} | finite
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        written = self._file.write(data)
        if written < len(data):  # a part of a line would make the next one unreadable
            self._file.truncate(self._file.tell() - written)
            raise OSError("no space left for a line")

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """Writes event files for `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: str | Path, first_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard then hides the steps from there on in existing files.
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        file_writer: Any = self._writer.file_writer
        file_writer.add_summary(Summary(value=values), step)  # one event for all
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class EvaluationTable:
    """Writes a Markdown table with a row per evaluation, and the columns of the first one."""

    def __init__(self, path: str | Path, first_step: int | None = None) -> None:
        self._path = Path(path)
        self._columns: list[str] = []
        if first_step is not None and self._path.exists():
            # A killed run may leave a row without its end, and rows of iterations that are repeated.
            head, rule, *rows = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
            self._columns = _cells(head)[1:]
            kept = [row for row in rows if row.endswith("\n") and int(_cells(row)[0]) < first_step]
            with replacing(self._path) as shorter:
                shorter.write_text("".join([head, rule, *kept]), encoding="utf-8")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        values = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
        if not values:
            return
        columns = self._columns or list(values)
        row = [str(step), *(f"{values[name]:.4f}" if name in values else "" for name in columns)]
        head = [] if self._columns else [["iteration", *columns], ["---:"] * (len(columns) + 1)]
        with self._path.open("w" if head else "a", encoding="utf-8") as file:
            file.writelines(f"| {' | '.join(cells)} |\n" for cells in [*head, row])
        self._columns = columns

    def close(self) -> None:
        pass


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def plot_reward_curve(metrics: Path, image: Path) -> Path | None:
    """Plots the rewards over the steps, each with its running mean; None, without an image, where all are missing."""
    # Without pyplot, which has a global state and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    lines = read_lines(metrics)
    curves = {name: points for name in SERIES if len(points := _points(lines, name))}
    if not curves:
        return None
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(curves.items()):
        color = f"C{number}"
        steps, values = points.T
        marker = "." if len(points) < 50 else None
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=1, marker=marker)
        width = max(1, len(values) // 10)  # the running mean is over a tenth of the curve
        means = [values[max(0, end - width) : end].mean() for end in range(1, len(values) + 1)]
        axes.plot(steps, means, color=color, linewidth=2, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(next(iter(curves)) if len(curves) == 1 else "value")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(image)
    return image


def _points(lines: list[dict[str, float | None]], name: str) -> np.ndarray:
    """Returns step and value, `(points, 2)`, in the order of the steps."""
    points = {line["step"]: line[name] for line in lines if line.get(name) is not None}
    return np.array(sorted(points.items()), dtype=float)
