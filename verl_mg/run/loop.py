"""Training loop: runs a recipe's iterations, from the newest checkpoint on.

    open_run_dir ─▶ Job ─▶ restore, start ─▶ evaluation 0 of a new run ─▶ iterations ─▶ save the model ─▶ close
                                                                              │
                                        a signal or an alarm on any rank ─────┴─▶ checkpoint ─▶ close

The loop consumes prompts and, in `one_iteration`, samples. It waits for the engines and for the other ranks, and ends
after the last iteration or at the first stop that all ranks have agreed on.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from verl_mg import device
from verl_mg.config import Config
from verl_mg.distributed.signals import EXIT_ALARM
from verl_mg.distributed.world import World
from verl_mg.errors import UserError
from verl_mg.job.job import Job
from verl_mg.job.recipe import Recipe, requested_roles
from verl_mg.monitor.prometheus import PrometheusEndpoint
from verl_mg.monitor.run_logger import RunLogger, check_monitoring
from verl_mg.monitor.status import StatusFile
from verl_mg.roles.trainable import NoOptimizerError
from verl_mg.run.checkpointer import AsyncCheckpointer
from verl_mg.run.job_state import restore
from verl_mg.run.mode import FULL_RUN, RunMode
from verl_mg.run.replay import Replay, ReplayRollout
from verl_mg.run.run_dir import CHECKPOINTS, open_run_dir

log = logging.getLogger(__name__)

MODEL, EXPORTS = "model", "export"


def train(recipe: Recipe, config: Config, world: World, mode: RunMode = FULL_RUN) -> None:
    """Runs all iterations of a job; all ranks call it together. `JobConfig` describes the outputs."""
    # What can be refused without a model is refused before the job loads one.
    roles = requested_roles(recipe, config)
    mode.check(recipe.name, roles)
    config = mode.apply_to(config)
    if config.job.deterministic:
        device.compute_deterministically()
    check_monitoring(config, world.size)
    replay = Replay.open(mode.replayed, config, recipe.name) if mode.replayed else None
    checkpoint = open_run_dir(config)
    checkpoint, last = (replay.checkpoint, replay.last) if replay else (checkpoint, config.job.iterations)
    with (
        StatusFile(config.job.output, recipe.name, last, world.rank, world.size) as status,
        PrometheusEndpoint(config, recipe.name, status, world) as endpoint,
    ):
        rollout = partial(ReplayRollout, replay.recording) if replay else None
        job = Job(config, roles, world.store, rollout, mode.learns, recipe.name, from_checkpoint=checkpoint is not None)
        world.watch_progress(job.timer)
        done = restore(job, checkpoint, recipe.name) if checkpoint else 0
        job.start()
        saver = AsyncCheckpointer(config.job.output / CHECKPOINTS, config.checkpoint, recipe.name, done or None)
        status.running(job.timer, done, lambda: saver.latest)
        books = RunLogger(recipe.name, job, status, done + 1, endpoint)
        if not done:
            books.log(0, _evaluation(job, 0))
        for iteration in range(done + 1, last + 1):
            with books.traced(iteration), job.timer("other"):
                metrics = one_iteration(recipe, job, iteration)
            metrics |= books.iteration(iteration)
            metrics |= _evaluation(job, iteration)
            books.log(iteration, metrics)
            world.report_iteration(iteration)
            _keep(job, saver, iteration, last, metrics)
            if books.stop_reason:
                world.signals.request_stop(EXIT_ALARM)
            # A collective: signals reach ranks at different times, and all have to leave after the same iteration.
            if iteration < last and world.signals.any_rank_stop_requested():
                reason = f"stopped {f'by {books.stop_reason}' if books.stop_reason else 'on request'}"
                reason += f" after iteration {iteration}"
                if mode.is_full:
                    _leave(job, saver, iteration, last, metrics, reason)
                status.left(reason)
                break
        else:
            if config.job.save:
                _save(job, config.job.output)
            saver.finish()
        books.close()
        job.close()


def one_iteration(recipe: Recipe, job: Job, iteration: int) -> dict[str, float]:
    """Runs one iteration of the recipe, from 1, and returns its metrics, equal on every rank; all ranks call it."""
    metrics = dict(job.begin(iteration))
    # Without optimizers the recipe's first update ends the iteration.
    with suppress(NoOptimizerError):
        metrics |= recipe.iteration(job, job.config.algorithm)
    return metrics


def _evaluation(job: Job, iteration: int) -> dict[str, float]:
    # Recipes without a rollout, such as SFT, have no engine that could answer the prompts.
    every, last = job.config.evaluation.every, job.config.job.iterations
    if not (every and (iteration % every == 0 or iteration == last) and "rollout" in job.requested):
        return {}
    with job.timer("evaluation"):
        return job.evaluate()


def _keep(job: Job, saver: AsyncCheckpointer, iteration: int, last: int, metrics: dict[str, float]) -> None:
    """Writes the checkpoint and the Hugging Face directory that are due after an iteration."""
    every = job.config.checkpoint.export_every
    if saver.due(iteration, last):
        with job.timer("checkpoint"):
            saver.begin(job, metrics)
    if every and iteration % every == 0:
        with job.timer("checkpoint"):
            _save(job, job.config.job.output / EXPORTS / f"{iteration:06d}")


def _save(job: Job, folder: Path) -> None:
    """Writes every trained model as a Hugging Face directory; UserError if they cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, role in job.trained.items():
            role.save(folder / (MODEL if name == "actor" else name), role.runner.spec.path)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: the model cannot be written ({error.strerror})") from None


def _leave(
    job: Job, saver: AsyncCheckpointer, iteration: int, last: int, metrics: dict[str, float], reason: str
) -> None:
    """Completes a checkpoint of this iteration; UserError if it cannot be written."""
    if not saver.due(iteration, last):
        saver.begin(job, metrics)
    if problem := saver.finish():
        raise UserError(f"{reason}, but the checkpoint was not written: {problem}")
    if dist.get_rank() == 0:
        log.warning("%s; the same command resumes from there", reason)
