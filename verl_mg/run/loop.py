"""Training loop: runs a recipe's iterations, from the newest checkpoint on.

    open_run_dir ─▶ RunningJob ─▶ restore, start ─▶ evaluation 0 of a new run ─▶ iterations ─▶ save the model ─▶ close
                                                                                     │
                                               a signal or an alarm on any rank ─────┴─▶ checkpoint ─▶ close

The loop consumes prompts and, in `one_iteration`, samples. It waits for the engines and for the other ranks, and ends
after the last iteration or at the first stop that all ranks have agreed on.
"""

from __future__ import annotations

import gc
import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from verl_mg import device
from verl_mg.config import Config
from verl_mg.distributed.signals import EXIT_ALARM
from verl_mg.distributed.world import World
from verl_mg.errors import UserError
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import Recipe, requested_roles
from verl_mg.monitor.prometheus import PrometheusEndpoint
from verl_mg.monitor.record_writer import RecordWriter
from verl_mg.monitor.run_logger import RunLogger, check_monitoring
from verl_mg.monitor.status import StatusFile
from verl_mg.phase_timer import HostMemory, PhaseTimer
from verl_mg.roles.models import NoOptimizerError
from verl_mg.run.checkpointer import AsyncCheckpointer
from verl_mg.run.job_state import restore
from verl_mg.run.replay import Replay, ReplayRollout
from verl_mg.run.run_dir import open_run_dir
from verl_mg.run.run_store import RunStore, run_store
from verl_mg.run.start_table import StartTable, announce
from verl_mg.stores.records import EXPORTS, MODEL

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunMode:
    """The part of a job that is run: all of it, only its rollouts, or only training on samples of an earlier run."""

    learns: bool = True
    """Whether roles have optimizers; without them an iteration ends where the recipe first requests an update."""
    replayed: str | None = None
    """RUN@ITERATION, whose samples are used in place of generated ones; see `verl_mg.run.replay`."""

    @property
    def is_full(self) -> bool:
        """Whether the whole job is run, so that another start can resume it."""
        return self.learns and self.replayed is None

    def apply_to(self, config: Config) -> Config:
        """Returns the configuration without what this part does not write: checkpoints, models that nothing trains."""
        if self.is_full:
            return config
        checkpoint = config.checkpoint.model_copy(update={"every": 0, "best": None})
        if self.learns:
            return config.model_copy(update={"checkpoint": checkpoint})
        checkpoint = checkpoint.model_copy(update={"export_every": 0})
        job = config.job.model_copy(update={"save": False})
        return config.model_copy(update={"checkpoint": checkpoint, "job": job})


FULL_RUN = RunMode()


def train(
    recipe: Recipe, config: Config, world: World, mode: RunMode = FULL_RUN, timer: PhaseTimer | None = None
) -> None:
    """Runs all iterations of a job; all ranks call it together. `JobConfig` describes the outputs.

    `timer` has the phases of this process up to the call.
    """
    timer = timer or PhaseTimer()
    timer.memory = timer.memory or HostMemory()
    # What can be refused without a model is refused before the job loads one.
    roles = requested_roles(recipe, config)
    if not mode.is_full and "rollout" not in roles:
        raise UserError(f"recipe {recipe.name}: it generates no samples. Leave --rollout-only and --replay out.")
    config = mode.apply_to(config)
    if config.job.deterministic:
        device.compute_deterministically()
    check_monitoring(config, world.size)
    replay = Replay.open(mode.replayed, config, recipe.name) if mode.replayed else None
    store = run_store(config.job, saves=config.job.save or config.checkpoint.export_every > 0)
    checkpoint = open_run_dir(config, store)
    store.start(int(checkpoint.name) if checkpoint else 0)
    checkpoint, last = (replay.checkpoint, replay.last) if replay else (checkpoint, config.job.iterations)
    with (
        store,  # last to end: it stores what the others write
        StatusFile(config.job.folder, recipe.name, last, world.rank, world.size) as status,
        PrometheusEndpoint(config, recipe.name, status, world) as endpoint,
        RecordWriter() as writer,
    ):
        rollout = partial(ReplayRollout, replay.recording) if replay else None
        resumes = checkpoint is not None
        job = RunningJob(
            config, roles, world.store, rollout, mode.learns, recipe.name, from_checkpoint=resumes, timer=timer
        )
        world.watch_progress(job.timer)
        # GPU: the table of what the job computes with, and after the first iteration its memory and that of the plan.
        # GPU-TEST: tests/run/test_start_table.py::test_job_on_cuda_prints_and_writes_its_table_once
        # GPU-RAN: not yet
        table = announce(job) if torch.cuda.is_available() else StartTable({})
        with job.timer("checkpoint"):
            done = restore(job, checkpoint, recipe.name) if checkpoint else 0
        job.start()
        if checkpoint:
            dist.barrier()  # all ranks have read it
            checkpoint.forget()
        # What has been built stays: without it a full collection of garbage takes 0.4 s less on each rank.
        gc.collect()
        gc.freeze()
        table = table.started(job)
        run = TrainingRun(recipe, job, store, world, done, last, status, endpoint, table, writer)
        run.iterate(resumable=mode.is_full)
        job.close()


class TrainingRun:
    """The iterations of a job after the `done` first ones, up to the `last`, and what is written after each."""

    def __init__(
        self,
        recipe: Recipe,
        job: RunningJob,
        store: RunStore,
        world: World,
        done: int,
        last: int,
        status: StatusFile,
        endpoint: PrometheusEndpoint,
        table: StartTable,
        writer: RecordWriter,
    ) -> None:
        self._recipe, self._job, self._store, self._world = recipe, job, store, world
        self._done, self._last, self._status, self._table = done, last, status, table

        def store_records() -> None:
            writer.wait()
            store.upload_records()

        self._saver = AsyncCheckpointer(
            store.checkpoints, job.config.checkpoint, recipe.name, done or None, store_records
        )
        status.running(job.timer, done, lambda: self._saver.latest)
        self._books = RunLogger(recipe.name, job, status, done + 1, endpoint, writer)

    def iterate(self, resumable: bool) -> None:
        """Runs all iterations, or as many as until a stop; a `resumable` run leaves a checkpoint then."""
        if not self._done:
            self._books.log(0, self._evaluation(0))
        for iteration in range(self._done + 1, self._last + 1):
            metrics = self._iteration(iteration)
            if iteration == self._done + 1:
                self._table.compare_memory(self._job)
            self._keep(iteration, metrics)
            if reason := self._stop_reason(iteration):
                if resumable:
                    self._leave(iteration, metrics, reason)
                self._status.left(reason)
                break
        else:
            if self._job.config.job.save:
                self._save()
            self._saver.finish()
        self._books.close()

    def _iteration(self, iteration: int) -> dict[str, float]:
        with self._books.traced(iteration), self._job.timer("other"):
            metrics = one_iteration(self._recipe, self._job, iteration)
        metrics |= self._books.iteration(iteration)
        metrics |= self._evaluation(iteration)
        self._books.log(iteration, metrics)
        self._world.report_iteration(iteration)
        return metrics

    def _evaluation(self, iteration: int) -> dict[str, float]:
        # Recipes without a rollout, such as SFT, have no engine that could answer the prompts.
        job = self._job
        every, last = job.config.evaluation.every, job.config.job.iterations
        if not (every and (iteration % every == 0 or iteration == last) and "rollout" in job.requested):
            return {}
        with job.timer("evaluation"):
            return job.evaluate()

    def _keep(self, iteration: int, metrics: dict[str, float]) -> None:
        """Writes the checkpoint and the Hugging Face directory that are due after an iteration."""
        job, every = self._job, self._job.config.checkpoint.export_every
        if self._saver.due(iteration, self._last):
            with job.timer("checkpoint"):
                self._saver.begin(job, metrics)
        if every and iteration % every == 0:
            with job.timer("checkpoint"):
                self._save(f"{EXPORTS}/{iteration:06d}/")

    def _save(self, above: str = "") -> None:
        """Writes every trained model as a Hugging Face directory; UserError if they cannot be written."""
        for name, role in self._job.trained.items():
            folder = above + (MODEL if name == "actor" else name)
            try:
                self._store.save(folder, partial(role.save, model_dir=role.runner.spec.path))
            except OSError as error:
                place = error.filename or self._job.config.job.output / folder
                raise UserError(f"{place}: the model cannot be written ({error.strerror})") from None

    def _stop_reason(self, iteration: int) -> str | None:
        alarm, signals = self._books.stop_reason, self._world.signals
        if alarm:
            signals.request_stop(EXIT_ALARM)
        # A collective: signals reach ranks at different times, and all have to leave after the same iteration.
        if iteration < self._last and signals.any_rank_stop_requested():
            return f"stopped {f'by {alarm}' if alarm else 'on request'} after iteration {iteration}"
        return None

    def _leave(self, iteration: int, metrics: dict[str, float], reason: str) -> None:
        """Completes a checkpoint of this iteration; UserError if it cannot be written."""
        if not self._saver.due(iteration, self._last):
            self._saver.begin(self._job, metrics)
        if problem := self._saver.finish():
            raise UserError(f"{reason}, but the checkpoint was not written: {problem}")
        if dist.get_rank() == 0:
            log.warning("%s; the same command resumes from there", reason)


def one_iteration(recipe: Recipe, job: RunningJob, iteration: int) -> dict[str, float]:
    """Runs one iteration of the recipe, from 1, and returns its metrics, equal on every rank; all ranks call it."""
    metrics = dict(job.begin(iteration))
    # Without optimizers the recipe's first update ends the iteration.
    with suppress(NoOptimizerError):
        metrics |= recipe.iteration(job, job.config.algorithm)
    return metrics
