"""Progress of a job on the console."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from verl_mg.monitor.status import EtaEstimator, format_seconds
from verl_mg.phase_timer import PhaseTimer

HEADLINES: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward/mean",),
    "loss": ("actor/loss", "reward_model/loss"),
    "length": ("response/length",),
    "eval": ("eval/reward",),
    "tokens/s": ("time/tokens_per_second",),
}
"""Label on the console -> metrics; the first one present is shown."""
PHASE_WIDTH = 17  # characters, so that the text after a phase does not move when it changes


class ConsoleTracker:
    """Shows a progress bar with the phase and headline metrics, or one plain line per step without a terminal."""

    # A thread of rich draws the bar four times a second, from the timer's phase and the values of the last `log`.

    def __init__(
        self,
        total_steps: int,
        title: str,
        *,
        first_step: int = 1,
        console: Console | None = None,
        timer: PhaseTimer | None = None,
    ) -> None:
        self._console = console or Console()
        self._latest: dict[str, float] = {}
        self._total, self._eta = total_steps, EtaEstimator(total_steps, first_step - 1)
        self._start_time = time.monotonic()
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _SecondsLeft(self._eta),
            _Phase(timer or PhaseTimer()),
            TextColumn("{task.fields[headline]}", markup=False),
            console=self._console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(title, total=total_steps, completed=first_step - 1, headline="")
        if self._live:
            self._progress.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._eta.update(step)
        if self._live:
            # The bar keeps the last value of metrics that are not measured in every step.
            self._latest |= metrics
            headline = self._headline(self._latest)
            self._progress.update(self._task, completed=step, headline=headline, refresh=True)
        else:  # a line is about its step only
            headline = self._headline(metrics)
            count = f"step {step:>{len(str(self._total))}}/{self._total}"
            self._print("  ".join(filter(None, [count, headline, self._times()])))

    def close(self) -> None:
        if self._live:
            self._progress.stop()

    def _headline(self, metrics: dict[str, float]) -> str:
        present = {label: [name for name in names if name in metrics] for label, names in HEADLINES.items()}
        return "  ".join(f"{label} {_short(metrics[names[0]])}" for label, names in present.items() if names)

    def _times(self) -> str:
        text, left = f"elapsed {format_seconds(time.monotonic() - self._start_time)}", self._eta.seconds_left
        return text if left is None else f"{text}  eta {format_seconds(left)}"

    def _print(self, line: str) -> None:
        # In a log file a line must not be wrapped, and names in brackets are not markup.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _SecondsLeft(ProgressColumn):
    """Remaining time; rich's column does not handle iterations of more than half a minute."""

    def __init__(self, eta: EtaEstimator) -> None:
        super().__init__()
        self._eta = eta

    def render(self, task: Task) -> Text:
        left = self._eta.seconds_left
        return Text("" if left is None else f"eta {format_seconds(left)}", style="progress.remaining")


class _Phase(ProgressColumn):
    """Current phase; rich's thread draws it, so it changes within an iteration."""

    def __init__(self, timer: PhaseTimer) -> None:
        super().__init__()
        self._timer = timer

    def render(self, task: Task) -> Text:
        return Text(f"{self._timer.phase:<{PHASE_WIDTH}}", style="cyan")


def _short(value: float) -> str:
    """Formats four digits, without an exponent for large numbers."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
