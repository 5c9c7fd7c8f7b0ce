"""Where the metrics of each iteration go: a file, TensorBoard, the console."""

import json
import math
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Label on the console -> the metrics that may stand behind it; the first one present is shown.
HEADLINES: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward/mean",),
    "loss": ("actor/loss", "reward_model/loss"),
    "length": ("response/length",),
    "eval": ("eval/reward",),
}


class Tracker(Protocol):
    """Takes the metrics of iterations. `step` counts iterations done, so the first one logs step 1."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write down the metrics of one iteration, at once."""

    def close(self) -> None:
        """Nothing is logged after this."""


class JsonlTracker:
    """One line a step: `{"step": 3, "reward/mean": 0.25, ...}`.

    Floats are written with all their digits, so two files compare bit for bit; what is not finite is null.
    """

    def __init__(self, path: str | Path, first_step: int | None = None) -> None:
        """Goes on after what the file holds.

        Args:
            path: the file; its folder is made.
            first_step: the step that is logged next; lines from there on, written by a run that was killed
                after its last checkpoint, are taken out.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _keep_lines_before(path, first_step)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        line = {"step": step} | {name: _finite_or_none(value) for name, value in metrics.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """Event files for `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: str | Path, first_step: int | None = None) -> None:
        """`first_step`: the step that is logged next; later ones already in the folder are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class EvaluationTable:
    """`| iteration | reward | pass@4 | ...`: a row for each evaluation, with the columns of the first one."""

    def __init__(self, path: str | Path) -> None:
        """Begins anew where the file is there."""
        self._path = Path(path)
        self._columns: list[str] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        told = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
        if not told:
            return
        lines = []
        if not self._columns:
            self._columns = list(told)
            lines = [["iteration", *self._columns], ["---:"] * (len(self._columns) + 1)]
        lines.append([str(step), *(f"{told[name]:.4f}" if name in told else "" for name in self._columns)])
        with self._path.open("w" if len(lines) > 1 else "a", encoding="utf-8") as file:
            file.writelines(f"| {' | '.join(cells)} |\n" for cells in lines)

    def close(self) -> None:
        pass


class ConsoleTracker:
    """A live bar with the headline metrics, or one plain line a step where there is no terminal."""

    def __init__(
        self,
        total_steps: int,
        title: str,
        *,
        headlines: Mapping[str, tuple[str, ...]] = HEADLINES,
        first_step: int = 1,
        console: Console | None = None,
    ) -> None:
        """
        Args:
            total_steps: the last step of the run.
            title: stands before the bar.
            headlines: label -> names of metrics; the first one present is shown.
            first_step: the step that is logged next; more than 1 in a resumed run.
            console: the one of stdout unless given.
        """
        self._console = console or Console()
        self._headlines = headlines
        self._latest: dict[str, float] = {}
        self._total = total_steps
        self._start_time, self._start_step = time.monotonic(), first_step - 1
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[headline]}", markup=False),
            console=self._console,
        )
        self._task = self._progress.add_task(
            title, total=total_steps, completed=self._start_step, headline=""
        )
        if self._live:
            self._progress.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._live:
            # The bar keeps the last value of what is not measured every step.
            self._latest |= metrics
            headline = self._headline(self._latest)
            self._progress.update(self._task, completed=step, headline=headline, refresh=True)
        else:
            headline = self._headline(metrics)
            count = f"step {step:>{len(str(self._total))}}/{self._total}"
            self._print("  ".join(filter(None, [count, headline, self._times(step)])))

    def close(self) -> None:
        if self._live:
            self._progress.stop()

    def _headline(self, metrics: dict[str, float]) -> str:
        present = {
            label: next((name for name in names if name in metrics), None)
            for label, names in self._headlines.items()
        }
        return "  ".join(
            f"{label} {metrics[name]:.4g}" for label, name in present.items() if name is not None
        )

    def _times(self, step: int) -> str:
        elapsed = time.monotonic() - self._start_time
        text = f"elapsed {_clock(elapsed)}"
        done = step - self._start_step
        return text if done <= 0 else f"{text}  eta {_clock(elapsed / done * max(self._total - step, 0))}"

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _keep_lines_before(path: Path, first_step: int | None) -> None:
    """Take out the lines from `first_step` on, and a last line that a killed run left half written."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    kept = [line for line in whole if first_step is None or json.loads(line)["step"] < first_step]
    shorter = path.with_name(path.name + ".new")
    shorter.write_text("".join(kept), encoding="utf-8")
    os.replace(shorter, path)


def _finite_or_none(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
