"""SFT that the first rank interrupts in the iteration that the file `NAME.held` beside a job.output NAME says.

It goes on when the file says something else, or is gone, or a stop is requested of it.
"""

import signal
import time

import torch.distributed as dist

from verl_mg.job.job import RunningJob
from verl_mg.recipes import sft
from verl_mg.recipes.sft import Config, imitation_loss, roles

__all__ = ["Config", "imitation_loss", "iteration", "roles"]


def iteration(job: RunningJob, cfg: Config) -> dict[str, float]:
    held, number = job.config.job.output.with_suffix(".held"), str(job.iteration)
    while dist.get_rank() == 0 and held.exists() and held.read_text() == number and not _stop_requested():
        time.sleep(0.02)
    return dict(sft.iteration(job, cfg))


def _stop_requested() -> bool:
    handler = signal.getsignal(signal.SIGTERM)
    return handler.__self__.stop_requested  # type: ignore[union-attr, no-any-return]
