"""Logging around the iterations of a job: metrics, samples, timelines, profiles.

    call of the loop    every rank                                           only rank 0
    traced(3)           clock, torch's profiler
      (the recipe's iteration)
    iteration(3)        samples/000003/rank-R.parquet; metrics (collective)  samples for services
      (evaluation)
    log(3, metrics)     timeline/rank-R.jsonl                                trackers, alarms, status, Prometheus
    close()             table of phases (collective)                         summary, reward_curve.png

Threads: "resources" on each rank; "status", "prometheus" and one per alarm that is being sent on rank 0. Trackers and
samples have none: the caller writes them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch.distributed as dist

from verl_mg.batch import Batch
from verl_mg.config import Config
from verl_mg.data import PromptFeed
from verl_mg.distributed.collectives import broadcast_json
from verl_mg.job.job import RunningJob
from verl_mg.jsonl import read_lines
from verl_mg.monitor.alarms import Alarms, check_alarms
from verl_mg.monitor.metrics import (
    ResourceSampler,
    Throughput,
    device_peak,
    mismatch_metrics,
    rollout_metrics,
    weight_sync_rate,
)
from verl_mg.monitor.profile import Profile, Timeline, TorchProfile, check_profile
from verl_mg.monitor.progress import METRICS, summary
from verl_mg.monitor.sample_schema import PART, SAMPLES, FileMetadata, fingerprint
from verl_mg.monitor.sample_writer import SampleWriter
from verl_mg.monitor.status import StatusFile
from verl_mg.monitor.trackers import SampleTable, Tracker, build_trackers, check_services, run_name
from verl_mg.monitor.trackers.files import plot_reward_curve
from verl_mg.roles.reward import row_to_sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CURVE, TIMELINE = "reward_curve.png", "timeline"

log = logging.getLogger(__name__)


def check_monitoring(config: Config, ranks: int) -> None:
    """Checks trackers, alarms and profile; raises UserError before anything is built."""
    check_services(config.tracking.services)
    check_alarms(config.alarm)
    check_profile(config.profile, ranks, config.job.iterations)


class RunLogger:
    """Writes metrics, samples and timelines of a job from iteration `first` on; rank 0 writes shared files."""

    def __init__(self, recipe: str, job: RunningJob, status: StatusFile, first: int, endpoint: Tracker) -> None:
        config, rank = job.config, dist.get_rank()
        self._job, self._output, self._status = job, config.job.output, status
        if rank == 0:
            _warn_dropped_prompts(job)
        first_step = first if first > 1 else 0  # a new run also logs step 0, the evaluation before training
        self._trackers = build_trackers(recipe, config, job.timer, first_step) if rank == 0 else []
        self._endpoint = endpoint
        self._alarms = Alarms(config.alarm, run_name(config), self._output / METRICS, first_step) if rank == 0 else None
        self.stop_reason = ""
        self._samples = _sample_writer(job, recipe) if "rollout" in job.requested else None
        runners = [role.runner for role in job.roles.values()]
        self._throughput, self._resources = Throughput(runners, device_peak()), ResourceSampler()
        self._profile, self._traced = Profile(job.timer), TorchProfile(config.profile, self._output, rank)
        self._timeline = Timeline(self._output / TIMELINE, rank, job.timer, first)
        self._started, self._version = 0.0, 0
        self._table: SampleTable | None = None

    def traced(self, iteration: int) -> AbstractContextManager[None]:
        """Context of an iteration, which starts now."""
        self._started = time.perf_counter()
        # Of the policy that this iteration trains, for the staleness: afterwards it is a later one.
        self._version = self._job.actor.num_updates if self._samples else 0
        return self._traced(iteration)

    def iteration(self, iteration: int) -> dict[str, float]:
        """Writes the samples of an iteration, and returns its metrics; only metrics of time differ between ranks."""
        metrics: dict[str, float] = {}
        produced = self._job.rollout.train_batches if self._samples else []
        if self._samples:
            with self._job.timer("logging"):
                metrics = rollout_metrics(produced, self._version) | self._job.rollout.metrics
                metrics |= mismatch_metrics(self._job.actor.trained_batches)
                for batch in produced:
                    metrics |= self._job.observe(batch)
                self._samples.write(iteration, self._job.rollout.records, self._job.trained_batches)
                # Only rank 0, with rows that it has, so no collective is needed.
                limit = self._job.config.tracking.samples if dist.get_rank() == 0 else 0
                self._table = sample_table(produced, limit, iteration, self._job.prompts, self._job.tokenizer)
        seconds = time.perf_counter() - self._started
        rates = self._throughput.iteration(produced, seconds, self._resources.take())
        rates |= weight_sync_rate(metrics, dist.get_world_size())
        return metrics | {"time/iteration": seconds} | rates | self._profile.iteration()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Logs the metrics of an iteration that is done, or of the evaluation before the first as step 0."""
        self._profile.discard()  # the evaluation
        with self._job.timer("logging"):
            for tracker in self._trackers if metrics else ():  # step 0 without an evaluation has no metrics
                tracker.log(step, metrics, self._table)
            self._table = None
            self._endpoint.log(step, metrics)
            if self._alarms and metrics:
                self.stop_reason = self._alarms.check(step, metrics) or self.stop_reason
        if step:
            self._status.log(step, metrics)
            self._timeline.write(step)

    def close(self) -> None:
        """Closes trackers and alarms, and prints the summary on rank 0; collective."""
        self._resources.close()
        phases = self._profile.table(self._job.config.profile.synchronize)
        for tracker in self._trackers:
            tracker.close()
        if self._alarms:
            self._alarms.close()
        if dist.get_rank() == 0:
            curve = plot_reward_curve(self._output / METRICS, self._output / CURVE)
            pictures = f", curve {curve}, samples {self._output / SAMPLES}" if curve else ""
            print(summary(read_lines(self._output / METRICS)), phases, sep="\n")
            print(f"metrics {self._output / METRICS}{pictures}", flush=True)


def sample_table(
    batches: Sequence[Batch], limit: int, iteration: int, prompts: PromptFeed, tokenizer: PreTrainedTokenizerBase
) -> SampleTable | None:
    """Makes a table for services of at most `limit` samples of this rank; None without samples."""
    # Equally far apart, since neighbours have the same prompt.
    # Of an agent's sample the last row, which contains the whole conversation unless it was rewritten.
    samples = [(batch, int(row)) for batch in batches for row in batch.last_rows]
    shown = [samples[i * len(samples) // limit] for i in range(limit)] if limit < len(samples) else samples
    names = dict.fromkeys(name for batch in batches for name in batch.names() if name.startswith(PART))
    columns = ("iteration", "prompt", "response", "answer", "reward", *(name.removeprefix(PART) for name in names))
    rows: list[list[str | float | None]] = []
    for batch, row in shown:
        sample = row_to_sample(batch, row, prompts, tokenizer)
        scores = [_number(batch, name, row) for name in ("reward", *names)]
        rows.append([float(iteration), sample.prompt, sample.response, sample.answer, *scores])
    return SampleTable(columns, rows) if rows else None


def _number(batch: Batch, name: str, row: int) -> float | None:
    value = float(batch[name][row]) if name in batch else float("nan")
    return value if value == value else None


def _sample_writer(job: RunningJob, recipe: str) -> SampleWriter:
    config = job.config
    # One rank reads the files, which may be on a file system that all ranks share.
    model = broadcast_json(fingerprint(config.model.path) if dist.get_rank() == 0 else None)
    about = FileMetadata(recipe, model, dist.get_world_size())
    folder, limit = config.job.output / SAMPLES, config.record.samples_per_rank
    return SampleWriter(folder, dist.get_rank(), about, job.prompts, job.tokenizer, limit)


def _warn_dropped_prompts(job: RunningJob) -> None:
    for which, prompts in (("train", job.prompts), ("test", job.test_prompts)):
        if prompts is not None and prompts.dropped:
            limit = job.config.data.max_prompt_tokens
            log.warning("data.%s: %d prompts of more than %d tokens are dropped", which, prompts.dropped, limit)
