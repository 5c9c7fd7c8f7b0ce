"""Trackers: destinations of the metrics of each iteration (files, TensorBoard, the console, services)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from verl_mg.config import Config
from verl_mg.monitor.status import METRICS
from verl_mg.monitor.trackers.console import ConsoleTracker
from verl_mg.monitor.trackers.files import EvaluationTable, JsonlTracker, TensorBoardTracker
from verl_mg.monitor.trackers.services import SERVICES, RunInfo, check_services
from verl_mg.monitor.trackers.tracker import RetryingTracker, SampleTable, Tracker
from verl_mg.phase_timer import PhaseTimer

__all__ = ["SampleTable", "Tracker", "build_trackers", "check_services", "run_name"]

EVALUATIONS = "evaluation.md"


def run_name(config: Config) -> str:
    """Returns the name of a run for services and alarms."""
    output = config.job.output
    return config.tracking.name or (output.absolute() if isinstance(output, Path) else output).name


def build_trackers(title: str, config: Config, timer: PhaseTimer, first_step: int = 0) -> list[RetryingTracker]:
    """Opens the trackers of a job; called on one rank. `first_step` is 0 in a new run, for the evaluation before it."""
    output = config.job.folder
    run = RunInfo(
        folder=output, project=config.tracking.project, name=run_name(config), tree=config.model_dump(mode="json")
    )
    openers: dict[str, Callable[[], Tracker]] = {
        METRICS: partial(JsonlTracker, output / METRICS, first_step),
        "TensorBoard": partial(TensorBoardTracker, output / "tensorboard", first_step),
        EVALUATIONS: partial(EvaluationTable, output / EVALUATIONS, first_step),
        **{name: partial(SERVICES[name][1], run) for name in config.tracking.services},
    }
    if config.job.console:
        steps, first = config.job.iterations, max(first_step, 1)
        openers["the console"] = partial(ConsoleTracker, steps, title, first_step=first, timer=timer)
    return [RetryingTracker(name, opener) for name, opener in openers.items()]
