"""The loop: a recipe's iteration, again and again, from the newest checkpoint on."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from verl_mg import platform
from verl_mg.config import Config
from verl_mg.errors import UserError
from verl_mg.job.checkpoints import Saver, restore
from verl_mg.job.folder import CHECKPOINTS, opened
from verl_mg.job.half import WHOLE, Half
from verl_mg.job.job import Job
from verl_mg.job.ranks.world import World
from verl_mg.job.recipe import Recipe, wanted_roles
from verl_mg.job.records.books import Books, check_books
from verl_mg.job.records.status import StatusFile
from verl_mg.job.replay import Replay
from verl_mg.roles.trained import NothingLearnsError

log = logging.getLogger(__name__)

MODEL, EXPORTS = "model", "export"


def run(recipe: Recipe, config: Config, world: World, half: Half = WHOLE) -> None:
    """All iterations of a job, on every rank; see `JobConfig` for where its results go."""
    roles = wanted_roles(recipe, config.algorithm)
    half.check(recipe.name, roles)
    config = half.configured(config)
    if config.job.deterministic:
        platform.compute_deterministically()
    check_books(config, world.size)
    replay = Replay.open(half.replayed, config, recipe.name) if half.replayed else None
    checkpoint = opened(config)
    checkpoint, last = (replay.checkpoint, replay.last) if replay else (checkpoint, config.job.iterations)
    with StatusFile(config.job.output, recipe.name, last, world.rank, world.size) as status:
        job = Job(config, roles, world.store, replay.recording if replay else None, half.learns)
        world.heed(job.clock)
        done = restore(job, checkpoint, recipe.name) if checkpoint else 0
        job.start()
        saver = Saver(config.job.output / CHECKPOINTS, config.checkpoint, recipe.name, done or None)
        status.running(job.clock, done, lambda: saver.latest)
        books = Books(recipe.name, job, status, done + 1)
        if not done:
            books.log(0, _evaluation(job, 0))
        for iteration in range(done + 1, last + 1):
            with books.traced(iteration), job.clock("recipe"):
                metrics = one_iteration(recipe, job, iteration)
            metrics |= books.iteration(iteration)
            metrics |= _evaluation(job, iteration)
            books.log(iteration, metrics)
            _keep(job, saver, iteration, last, metrics)
            if iteration < last and world.signals.asked_to_leave():
                if half.whole:
                    _leave(job, saver, iteration, last, metrics)
                status.left(f"told to leave after iteration {iteration}")
                break
        else:
            if config.job.save:
                _save(job, config.job.output)
            saver.finish()
        books.close()
        job.close()


def one_iteration(recipe: Recipe, job: Job, iteration: int) -> dict[str, float]:
    """The recipe's iteration, and its metrics, the same on every rank."""
    metrics = dict(job.begin(iteration))
    with suppress(NothingLearnsError):
        metrics |= recipe.iteration(job, job.config.algorithm)
    job.settle()
    return metrics


def _evaluation(job: Job, iteration: int) -> dict[str, float]:
    every, last = job.config.evaluation.every, job.config.job.iterations
    if not (every and (iteration % every == 0 or iteration == last) and hasattr(job, "rollout")):
        return {}
    with job.clock("evaluation"):
        return job.evaluate()


def _keep(job: Job, saver: Saver, iteration: int, last: int, metrics: dict[str, float]) -> None:
    """What is due after an iteration: a checkpoint, a Hugging Face directory."""
    every = job.config.checkpoint.export_every
    if saver.due(iteration, last):
        with job.clock("checkpoint"):
            saver.begin(job, metrics)
    if every and iteration % every == 0:
        with job.clock("checkpoint"):
            _save(job, job.config.job.output / EXPORTS / f"{iteration:06d}")


def _save(job: Job, folder: Path) -> None:
    """Every trained model as a Hugging Face directory; UserError where the disk is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, role in job.trained.items():
            role.save(folder / (MODEL if name == "actor" else name), role.model_dir)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: the model cannot be written ({error.strerror})") from None


def _leave(job: Job, saver: Saver, iteration: int, last: int, metrics: dict[str, float]) -> None:
    """Have a checkpoint of this iteration; UserError where it cannot be written."""
    if not saver.due(iteration, last):
        saver.begin(job, metrics)
    if problem := saver.finish():
        raise UserError(f"told to leave after iteration {iteration}, and the checkpoint was not written: {problem}")
    if dist.get_rank() == 0:
        log.warning("left after iteration %d as told; the same command goes on from there", iteration)
