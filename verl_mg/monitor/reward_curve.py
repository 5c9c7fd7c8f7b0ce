"""Plot of the rewards of a run."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from verl_mg.jsonl import read_lines

SERIES = ("reward/mean", "eval/reward")


def plot_reward_curve(
    metrics_jsonl_path: str | Path,
    png_path: str | Path,
    series: Sequence[str] = SERIES,
    title: str = "",
) -> Path | None:
    """Plots metrics over the steps, each with its running mean; None, without an image, where all are missing."""
    # Without pyplot, which has a global state and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    lines = read_lines(Path(metrics_jsonl_path))
    curves = {name: points for name in series if len(points := _points(lines, name))}
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
        axes.plot(steps, _running_mean(values), color=color, linewidth=2, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel(next(iter(curves)) if len(curves) == 1 else "value")
    axes.set_title(title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path = Path(png_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _points(lines: list[dict[str, float | None]], name: str) -> np.ndarray:
    """Returns step and value, `(points, 2)`, in the order of the steps."""
    points = {line["step"]: line[name] for line in lines if line.get(name) is not None}
    return np.array(sorted(points.items()), dtype=float)


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean of each value and those before it, over a tenth of the curve, `(n,)`."""
    width = max(1, len(values) // 10)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    means: np.ndarray = (sums[ends] - sums[starts]) / (ends - starts)
    return means
