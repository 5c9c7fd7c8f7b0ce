"""The line that people look at while a job runs."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from verl_mg.monitor.eta import EtaEstimator, format_seconds
from verl_mg.phase_timer import PhaseTimer

# Label on the console -> the metrics that may stand behind it; the first one present is shown.
HEADLINES: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward/mean",),
    "loss": ("actor/loss", "reward_model/loss"),
    "length": ("response/length",),
    "eval": ("eval/reward",),
    "tokens/s": ("time/tokens_per_second",),
}
PHASE_WIDTH = 10
"""Characters: what stands behind a phase does not jump when it changes."""


class ConsoleTracker:
    """A live bar with the phase and the headline metrics, or one plain line a step where there is no terminal."""

    def __init__(
        self,
        total_steps: int,
        title: str,
        *,
        headlines: Mapping[str, tuple[str, ...]] = HEADLINES,
        first_step: int = 1,
        console: Console | None = None,
        timer: PhaseTimer | None = None,
    ) -> None:
        """
        Args:
            total_steps: the last step of the run.
            title: stands before the bar.
            headlines: label -> names of metrics; the first one present is shown.
            first_step: the step that is logged next; more than 1 in a resumed run.
            console: the one of stdout unless given.
            clock: what this rank does now is asked of it.
        """
        self._console = console or Console()
        self._headlines = headlines
        self._latest: dict[str, float] = {}
        self._total, self._pace = total_steps, EtaEstimator(total_steps, first_step - 1)
        self._start_time = time.monotonic()
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _Left(self._pace),
            _Phase(timer or PhaseTimer()),
            TextColumn("{task.fields[headline]}", markup=False),
            console=self._console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(title, total=total_steps, completed=first_step - 1, headline="")
        if self._live:
            self._progress.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._pace.reached(step)
        if self._live:
            # The bar keeps the last value of what is not measured every step.
            self._latest |= metrics
            headline = self._headline(self._latest)
            self._progress.update(self._task, completed=step, headline=headline, refresh=True)
        else:
            headline = self._headline(metrics)
            count = f"step {step:>{len(str(self._total))}}/{self._total}"
            self._print("  ".join(filter(None, [count, headline, self._times()])))

    def close(self) -> None:
        if self._live:
            self._progress.stop()

    def _headline(self, metrics: dict[str, float]) -> str:
        present = {
            label: next((name for name in names if name in metrics), None) for label, names in self._headlines.items()
        }
        return "  ".join(f"{label} {_short(metrics[name])}" for label, name in present.items() if name is not None)

    def _times(self) -> str:
        text, left = f"elapsed {format_seconds(time.monotonic() - self._start_time)}", self._pace.left
        return text if left is None else f"{text}  eta {format_seconds(left)}"

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Left(ProgressColumn):
    """Seconds to the end; rich's own column forgets iterations that take longer than half a minute."""

    def __init__(self, pace: EtaEstimator) -> None:
        super().__init__()
        self._pace = pace

    def render(self, task: Task) -> Text:
        left = self._pace.left
        return Text("" if left is None else f"eta {format_seconds(left)}", style="progress.remaining")


class _Phase(ProgressColumn):
    """Drawn by rich's own thread, so that it moves within an iteration."""

    def __init__(self, timer: PhaseTimer) -> None:
        super().__init__()
        self._clock = timer

    def render(self, task: Task) -> Text:
        return Text(f"{self._clock.phase:<{PHASE_WIDTH}}", style="cyan")


def _short(value: float) -> str:
    """Four digits, and no exponent where a number is merely large."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
