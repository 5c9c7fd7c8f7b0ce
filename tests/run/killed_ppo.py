"""PPO whose ranks are killed while a phase goes on, as `kill.json` beside job.output says."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.run.jobs import kill_ranks
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.job.job import RunningJob
from verl_mg.recipes import ppo
from verl_mg.recipes.ppo import Config, policy_loss, roles
from verl_mg.stores.folders import PARTIAL

__all__ = ["Config", "iteration", "policy_loss", "roles"]

WRITING = "writing a checkpoint"


def iteration(job: RunningJob, cfg: Config) -> dict[str, float]:
    plan = job.config.job.output.parent / "kill.json"
    if plan.exists() and not hasattr(job, "watched"):
        job.watched, pids = True, all_gather_json(os.getpid())
        if dist.get_rank() == 0:
            _kill_in_phase(job, json.loads(plan.read_text()), pids)
    return ppo.iteration(job, cfg)


class _Phases(list[str]):
    """Phases that are running; calls a function with the name of each that begins."""

    def __init__(self, running: Iterable[str], begins: Callable[[str], None]) -> None:
        super().__init__(running)
        self._begins = begins

    def append(self, phase: str) -> None:
        super().append(phase)
        self._begins(phase)


def _kill_in_phase(job: RunningJob, plan: dict[str, Any], pids: list[int]) -> None:
    due = threading.Event()

    def begins(phase: str) -> None:
        if phase == plan["phase"] and job.iteration >= plan["iteration"]:
            due.set()

    def kill() -> None:
        due.wait()
        time.sleep(plan["delay"])
        kill_ranks(pids)

    job.timer._running = _Phases(job.timer._running, begins)
    make = Path.mkdir

    def make_noted(path: Path, *arguments: Any, **options: Any) -> None:
        make(path, *arguments, **options)
        if path.suffix == PARTIAL:
            begins(WRITING)

    Path.mkdir = make_noted  # type: ignore[method-assign]  # of a process that is killed
    threading.Thread(target=kill, daemon=True).start()
