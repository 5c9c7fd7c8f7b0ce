"""The trackers of a job, as its configuration has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from verl_mg.config import Config
from verl_mg.monitor.summary import METRICS
from verl_mg.monitor.trackers.console import ConsoleTracker
from verl_mg.monitor.trackers.files import EvaluationTable, JsonlTracker
from verl_mg.monitor.trackers.retrying_tracker import RetryingTracker
from verl_mg.monitor.trackers.services import SERVICES, RunInfo
from verl_mg.monitor.trackers.tensorboard import TensorBoardTracker
from verl_mg.monitor.trackers.tracker import Tracker
from verl_mg.phase_timer import PhaseTimer

EVALUATIONS = "evaluation.md"


def build_trackers(title: str, config: Config, timer: PhaseTimer, first_step: int = 0) -> list[Tracker]:
    """All of them, each guarded; on one rank alone.

    title: of the console's bar. first_step: see `Tracker`; 0, of the evaluation before training, in a run that begins.
    """
    output = config.job.output
    run = RunInfo(
        folder=output,
        project=config.tracking.project,
        name=config.tracking.name or output.absolute().name,
        tree=config.model_dump(mode="json"),
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
    return [RetryingTracker(name, opened) for name, opened in openers.items()]
