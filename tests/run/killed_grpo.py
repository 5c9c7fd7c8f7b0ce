"""GRPO whose ranks are killed some time after an iteration began, as `kill.json` beside job.output says."""

import json
import os
import threading
import time

import torch.distributed as dist

from tests.run.jobs import kill_ranks
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.job.job import RunningJob
from verl_mg.recipes import grpo
from verl_mg.recipes.grpo import Config, policy_loss, roles

__all__ = ["Config", "iteration", "policy_loss", "roles"]


def iteration(job: RunningJob, cfg: Config) -> dict[str, float]:
    file = job.config.job.output.parent / "kill.json"
    plan = json.loads(file.read_text()) if file.exists() else {"iteration": None}
    if plan["iteration"] == job.iteration:
        pids = all_gather_json(os.getpid())
        if dist.get_rank() == 0:
            threading.Thread(target=_kill, args=(plan["delay"], pids), daemon=True).start()
    metrics = grpo.iteration(job, cfg)
    if plan["iteration"] == job.iteration + 1:
        time.sleep(plan["pause"])  # in which the engine generates, before the last checkpoint
    return metrics


def _kill(delay: float, pids: list[int]) -> None:
    time.sleep(delay)
    kill_ranks(pids)
