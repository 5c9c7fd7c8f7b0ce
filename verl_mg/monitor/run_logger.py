"""All that is written down around the iterations of a job."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager

import torch.distributed as dist

from verl_mg.config import Config
from verl_mg.job.job import Job
from verl_mg.jsonl import read_lines
from verl_mg.monitor.build_trackers import build_trackers
from verl_mg.monitor.profile import Profile
from verl_mg.monitor.reward_curve import plot_reward_curve
from verl_mg.monitor.rollout_metrics import rollout_metrics
from verl_mg.monitor.sample_schema import SAMPLES, FileMetadata, fingerprint
from verl_mg.monitor.sample_writer import SampleWriter
from verl_mg.monitor.status import StatusFile
from verl_mg.monitor.summary import METRICS, summary
from verl_mg.monitor.throughput import Throughput, device_peak
from verl_mg.monitor.timeline import Timeline
from verl_mg.monitor.torch_profile import TorchProfile, check_profile
from verl_mg.monitor.trackers.services import check_services

CURVE, TIMELINE = "reward_curve.png", "timeline"

log = logging.getLogger(__name__)


def check_trackers_and_profile(config: Config, ranks: int) -> None:
    """UserError, before anything is built, for a tracker that is not installed or a profile of what is not there."""
    check_services(config.tracking.services)
    check_profile(config.profile, ranks, config.job.iterations)


class RunLogger:
    """Metrics and where they go, samples, time lines, profiles. Every rank has them; files of the job are rank 0's.

    first: the iteration that comes first; what an earlier start wrote of it and later ones is taken out.
    """

    def __init__(self, recipe: str, job: Job, status: StatusFile, first: int) -> None:
        config, rank = job.config, dist.get_rank()
        self._job, self._output, self._status = job, config.job.output, status
        if rank == 0:
            _tell_what_was_left_out(job)
        self._trackers = build_trackers(recipe, config, job.timer, first if first > 1 else 0) if rank == 0 else []
        self._samples = _sample_writer(job, recipe) if "rollout" in job.requested else None
        runners = [role.runner for role in job.roles.values()]
        self._throughput = Throughput(runners, device_peak())
        self._profile, self._traced = Profile(job.timer), TorchProfile(config.profile, self._output, rank)
        self._timeline = Timeline(self._output / TIMELINE, rank, job.timer, first)
        self._started, self._version = 0.0, 0

    def traced(self, iteration: int) -> AbstractContextManager[None]:
        """Around an iteration, which begins."""
        self._started = time.perf_counter()
        self._version = self._job.actor.num_updates if self._samples else 0
        return self._traced(iteration)

    def iteration(self, iteration: int) -> dict[str, float]:
        """Write its samples; the metrics of its rollouts and of its time, which alone differ from rank to rank."""
        metrics: dict[str, float] = {}
        produced = self._job.rollout.produced if self._samples else []
        if self._samples:
            with self._job.timer("logging"):
                metrics = rollout_metrics(produced, self._version) | self._job.rollout.metrics
                for batch in produced:
                    metrics |= self._job.observe(batch)
                self._samples.write(iteration, self._job.rollout.handed, self._job.trained_batches)
        seconds = time.perf_counter() - self._started
        rates = self._throughput.iteration(produced, seconds)
        return metrics | {"time/iteration": seconds} | rates | self._profile.iteration()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The iteration is over; 0 is what was before the first."""
        self._profile.leave_out()  # the evaluation
        with self._job.timer("logging"):
            for tracker in self._trackers if metrics else ():
                tracker.log(step, metrics)
        if step:
            self._status.log(step, metrics)
            self._timeline.write(step)

    def close(self) -> None:
        """Tell on rank 0 how it went; all ranks call it together."""
        phases = self._profile.table(self._job.config.profile.synchronize)
        for tracker in self._trackers:
            tracker.close()
        if dist.get_rank() == 0:
            curve = plot_reward_curve(self._output / METRICS, self._output / CURVE)
            pictures = f", curve {curve}, samples {self._output / SAMPLES}" if curve else ""
            print(summary(read_lines(self._output / METRICS)), phases, sep="\n")
            print(f"metrics {self._output / METRICS}{pictures}", flush=True)


def _sample_writer(job: Job, recipe: str) -> SampleWriter:
    config = job.config
    about = FileMetadata(recipe, fingerprint(config.model.path), dist.get_world_size())
    folder, limit = config.job.output / SAMPLES, config.record.samples_per_rank
    return SampleWriter(folder, dist.get_rank(), about, job.reward, job.prompts, job.tokenizer, limit)


def _tell_what_was_left_out(job: Job) -> None:
    for which, prompts in (("train", job.prompts), ("test", job.test_prompts)):
        if prompts is not None and prompts.dropped:
            limit = job.config.data.max_prompt_tokens
            log.warning("data.%s: %d prompts of more than %d tokens are left out", which, prompts.dropped, limit)
