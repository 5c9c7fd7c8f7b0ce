"""The loop: a recipe's iteration, again and again, and what is written down around it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch.distributed as dist

from verl_mg.config import Config, dump_config
from verl_mg.errors import UserError
from verl_mg.job.curve import draw_curve
from verl_mg.job.job import Job
from verl_mg.job.observe import rollout_metrics, sample_records
from verl_mg.job.profile import Profile
from verl_mg.job.recipe import Recipe, wanted_roles
from verl_mg.job.trace import SampleTrace
from verl_mg.job.trackers import ConsoleTracker, EvaluationTable, JsonlTracker, TensorBoardTracker, Tracker
from verl_mg.job.world import World

log = logging.getLogger(__name__)

METRICS, CURVE, MODEL, EVALUATIONS = "metrics.jsonl", "reward_curve.png", "model", "evaluation.md"


def run(recipe: Recipe, config: Config, world: World) -> None:
    """All iterations of a job, on every rank; see `JobConfig` for where its results go."""
    job = Job(config, wanted_roles(recipe, config.algorithm), world.store)
    output = config.job.output
    if world.rank == 0:
        _open_folder(output, config)
        _tell_what_was_left_out(job)
    dist.barrier()  # the other ranks write nothing until the folder is known to be free
    trackers = _trackers(recipe, config) if world.rank == 0 else []
    trace = SampleTrace(output / "samples", world.rank) if hasattr(job, "rollout") else None
    _log(trackers, 0, _evaluation(job, 0))
    profile = Profile(job.clock)
    for iteration in range(1, config.job.iterations + 1):
        with job.clock("recipe"):
            metrics = one_iteration(recipe, job, iteration, trace)
        metrics |= profile.iteration() | _evaluation(job, iteration)
        profile.leave_out()  # the evaluation
        with job.clock("logging"):
            _log(trackers, iteration, metrics)
    if config.job.profile:
        told = profile.table()
        if world.rank == 0:
            print(told, flush=True)
    for tracker in trackers:
        tracker.close()
    if trace is not None:
        trace.close()
    if config.job.save:
        for name, role in job.trained.items():
            role.save(output / (MODEL if name == "actor" else name), role.model_dir)
    job.close()
    if world.rank == 0:
        _tell(output)


def one_iteration(recipe: Recipe, job: Job, iteration: int, trace: SampleTrace | None) -> dict[str, float]:
    """The recipe's iteration and its metrics, the same on every rank but for `time/`."""
    started = time.perf_counter()
    weights, version = job.begin(iteration), job.actor.updates if trace is not None else 0
    metrics = weights | recipe.iteration(job, job.config.algorithm)
    job.settle()
    if trace is not None:
        with job.clock("logging"):
            produced, job.rollout.produced = job.rollout.produced, []
            metrics |= rollout_metrics(produced, version) | job.rollout.metrics
            for batch in produced:
                metrics |= job.observe(batch)
                trace.write(sample_records(iteration, batch, job.reward))
    return metrics | {"time/iteration": time.perf_counter() - started}


def _evaluation(job: Job, iteration: int) -> dict[str, float]:
    every, last = job.config.evaluation.every, job.config.job.iterations
    due = every and (iteration % every == 0 or iteration == last)
    return job.evaluate() if due and hasattr(job, "rollout") else {}


def _open_folder(output: Path, config: Config) -> None:
    # A start that failed before its first iteration leaves nothing worth keeping.
    if (output / METRICS).exists() and (output / METRICS).stat().st_size:
        raise UserError(f"{output}: holds an earlier run; choose another job.output or move the folder away")
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output}: job.output cannot be written ({error.strerror})") from None


def _tell_what_was_left_out(job: Job) -> None:
    for which, prompts in (("train", job.prompts), ("test", job.test_prompts)):
        if prompts is not None and prompts.dropped:
            limit = job.config.data.max_prompt_tokens
            log.warning("data.%s: %d prompts of more than %d tokens are left out", which, prompts.dropped, limit)


def _trackers(recipe: Recipe, config: Config) -> list[Tracker]:
    output = config.job.output
    trackers: list[Tracker] = [
        JsonlTracker(output / METRICS),
        TensorBoardTracker(output / "tensorboard"),
        EvaluationTable(output / EVALUATIONS),
    ]
    if config.job.console:
        trackers.append(ConsoleTracker(config.job.iterations, recipe.name))
    return trackers


def _log(trackers: list[Tracker], step: int, metrics: dict[str, float]) -> None:
    for tracker in trackers:
        if metrics:
            tracker.log(step, metrics)


def _tell(output: Path) -> None:
    curve = draw_curve(output / METRICS, output / CURVE)
    pictures = f", curve {curve}, samples {output / 'samples'}" if curve else ""
    print(f"metrics {output / METRICS}{pictures}", flush=True)
