"""PPO whose ranks are killed while a phase goes on, as `kill.json` beside job.output says."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from recipes import ppo
from recipes.ppo import Config, policy_loss, roles
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.job.job import Job

__all__ = ["Config", "iteration", "policy_loss", "roles"]

WRITING = "writing a checkpoint"


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    plan = job.config.job.output.parent / "kill.json"
    if plan.exists() and not hasattr(job, "watched"):
        job.watched, pids = True, all_gather_json(os.getpid())
        if dist.get_rank() == 0:
            arguments = (job, json.loads(plan.read_text()), pids)
            threading.Thread(target=_watch, args=arguments, daemon=True).start()
    return ppo.iteration(job, cfg)


def _watch(job: Job, plan: dict[str, float | str], pids: list[int]) -> None:
    sys.setswitchinterval(1e-4)
    checkpoints = job.config.job.output / "checkpoints"
    while True:
        now = WRITING if plan["phase"] == WRITING and _partial(checkpoints) else job.timer.phase
        if job.iteration >= plan["iteration"] and now == plan["phase"]:
            time.sleep(plan["delay"])
            for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
                os.kill(pid, signal.SIGKILL)
        time.sleep(1e-4)


def _partial(folder: Path) -> bool:
    return any(folder.glob("*.partial"))
