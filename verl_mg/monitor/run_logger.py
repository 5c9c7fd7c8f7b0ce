"""Logging around the iterations of a job: metrics, samples, the table and timeline of phases, profiles of torch.

    call of the loop    every rank                                             only rank 0
    traced(3)           clock, torch's profiler
      (the recipe's iteration)
    iteration(3)        metrics (one collective); samples/000003/rank-R.parquet *
      (evaluation)
    log(3, metrics)     timeline/rank-R.jsonl *                                trackers *, status *, alarms, Prometheus
    close()             table of phases (collective)                           summary, reward_curve.png

What has a * is written by the thread "records" while the next iteration generates, see `record_writer`. Other threads:
"resources" on each rank; "status", "prometheus" and one per alarm that is being sent on rank 0.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from verl_mg.batch import Batch
from verl_mg.config import Config, ProfileConfig
from verl_mg.distributed.collectives import all_gather_json, broadcast_json
from verl_mg.errors import UserError
from verl_mg.job.job import RunningJob
from verl_mg.jsonl import keep_before, read_lines, replacing
from verl_mg.layout import parse_ranks
from verl_mg.monitor.alarms import Alarms, check_alarms
from verl_mg.monitor.metrics import (
    ResourceSampler,
    Throughput,
    device_peak,
    mismatch_metrics,
    mismatch_statistics,
    over_ranks,
    rates,
    rollout_metrics,
    rollout_sums,
    weight_sync_rate,
)
from verl_mg.monitor.record_writer import RecordWriter
from verl_mg.monitor.sample_schema import PART, SAMPLES, FileMetadata, fingerprint
from verl_mg.monitor.sample_writer import SampleWriter
from verl_mg.monitor.status import METRICS, StatusFile, summary
from verl_mg.monitor.trackers import SampleTable, Tracker, build_trackers, check_services, run_name
from verl_mg.monitor.trackers.files import plot_reward_curve
from verl_mg.phase_timer import COMPUTE_PHASES, WAIT, PhaseTimer
from verl_mg.roles.reward import SampleTexts
from verl_mg.rows.samples import as_of_now

CURVE, TIMELINE = "reward_curve.png", "timeline"

log = logging.getLogger(__name__)

INEXACT = "A phase can include waiting for the work of another one; profile.synchronize=true separates them."
WARMUP_ITERATIONS = 1
"""First iterations, which are excluded where there are more: they include planning and compilation."""
PROFILES = "profile"
MEMORY_EVENTS = 200_000  # number of latest allocations in a snapshot, each with its stack


class Profile:
    """Sums the phases of a timer over the iterations."""

    def __init__(self, timer: PhaseTimer) -> None:
        self._timer = timer
        self._sums: dict[str, float] = {}
        self._iterations = 0
        self.discard()

    def iteration(self) -> dict[str, float]:
        """Returns the metrics `time/phase/NAME` of the iteration that ends now, on this rank."""
        seconds = self._timer.take()
        if self._iterations == WARMUP_ITERATIONS:  # there are more iterations, so the first ones do not count
            self._sums = {}
        for phase, value in seconds.items():
            self._sums[phase] = self._sums.get(phase, 0.0) + value
        self._iterations += 1
        return {f"time/phase/{phase}": value for phase, value in sorted(seconds.items())}

    def discard(self) -> None:
        """Discards the time since the last iteration (evaluation, logging)."""
        self._timer.take()

    def table(self, exact: bool = True) -> str:
        """Returns the table of phases over all ranks, "" where no iteration was done; collective."""
        # Without `exact`, where the timer does not synchronize phases, the table says so.
        counted = self._iterations - WARMUP_ITERATIONS if self._iterations > WARMUP_ITERATIONS else self._iterations
        ranks = all_gather_json({phase: value / counted for phase, value in self._sums.items()})
        if not any(ranks):
            return ""
        return format_table(ranks) if exact else f"{format_table(ranks)}\n{INEXACT}"


def format_table(ranks: list[Mapping[str, float]]) -> str:
    """Formats a table of phases, by the mean seconds per iteration of each rank."""
    # The means add up to the iteration, since every wait is a phase too.
    columns = {phase: [rank.get(phase, 0.0) for rank in ranks] for phase in {phase for rank in ranks for phase in rank}}
    means = {phase: sum(column) / len(ranks) for phase, column in columns.items()}
    total = sum(means.values())
    width = max(map(len, ("total", *columns))) + 2
    lines = [f"{'phase':<{width}}{'mean s':>10}{'max s':>10}{'share':>9}"]
    for phase in sorted(means, key=lambda phase: (-means[phase], phase)):
        lines.append(f"{phase:<{width}}{means[phase]:>10.3f}{max(columns[phase]):>10.3f}{means[phase] / total:>9.1%}")
    # Not the sum of the column: another rank may be the slowest one in each phase.
    slowest = max(sum(rank.values()) for rank in ranks)
    lines.append(f"{'total':<{width}}{total:>10.3f}{slowest:>10.3f}{1:>9.1%}")
    compute = sum(mean for phase, mean in means.items() if phase in COMPUTE_PHASES)
    waits = sum(mean for phase, mean in means.items() if phase.startswith(WAIT))
    overhead = total - compute - waits
    lines.append(
        f"compute ({', '.join(COMPUTE_PHASES)}) {compute / total:.1%}, waiting for other ranks {waits / total:.1%}, "
        f"overhead {overhead:.3f} of {total:.3f} s, {overhead / total:.1%} of an iteration"
    )
    return "\n".join(lines)


class Timeline:
    """Writes the phases of this rank: `{"iteration": 3, "start": <Unix seconds>, "spans": [["update", 0.0, 1.2]]}`."""

    # An iteration starts where the line of the previous one was made, so evaluation and logging belong to it.

    def __init__(self, folder: str | Path, rank: int, timer: PhaseTimer, first_step: int | None = None) -> None:
        self._path, self._timer, self._failed = Path(folder) / f"rank-{rank}.jsonl", timer, False
        self._begin()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                keep_before(self._path, "iteration", first_step)
        except OSError as error:
            self._disable(error)

    def line(self, iteration: int) -> str:
        """Returns the line of an iteration that is done; the next one starts here."""
        start, zero = self._start, self._zero
        spans = [
            (phase, round(begin - zero, 6), round(end - zero, 6)) for phase, begin, end in self._timer.take_spans()
        ]
        self._begin()
        return json.dumps({"iteration": iteration, "start": start, "spans": spans})

    def write(self, line: str) -> None:
        """Writes a line; the first failure ends the timeline."""
        if self._failed:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            self._disable(error)

    def _begin(self) -> None:
        # Two clocks: ranks are compared by the time of day, and durations must not change when that is corrected.
        self._start, self._zero = time.time(), time.perf_counter()
        self._timer.take_spans()

    def _disable(self, error: OSError) -> None:
        self._failed = True
        log.warning("%s: the timeline of this rank ends here (%s)", self._path, error.strerror or error)


def check_profile(config: ProfileConfig, ranks: int, iterations: int) -> None:
    """Raises UserError where a rank or iteration does not exist, or there is no GPU whose memory could be recorded."""
    try:
        chosen = parse_ranks(config.ranks)
    except UserError as error:
        raise UserError(f"profile.ranks: {error}") from None
    if chosen[-1] >= ranks:
        raise UserError(f"profile.ranks={config.ranks}: the job's ranks are 0 to {ranks - 1}. Set some of these.")
    if beyond := [number for number in config.iterations if number > iterations]:
        raise UserError(f"profile.iterations: {beyond[0]} is after the last one. Set 1 to {iterations}.")
    if config.memory and not config.iterations:
        raise UserError("profile.memory=true: no iterations are set. Set some, such as profile.iterations=[3].")
    # GPU: `profile.memory` records allocations.
    # GPU-TEST: tests/monitor/test_profile.py::test_check_profile_invalid_section_raises
    # GPU-RAN: not yet
    if config.memory and not torch.cuda.is_available():
        raise UserError("profile.memory=true: only GPU memory is recorded, and there is no GPU. Remove it.")


class TorchProfile:
    """Writes traces of the selected iterations and ranks to RUN/profile."""

    def __init__(self, config: ProfileConfig, output: Path, rank: int) -> None:
        self._iterations = set(config.iterations) if rank in parse_ranks(config.ranks) else set()
        self._memory, self._folder, self._rank = config.memory, output / PROFILES, rank

    @contextmanager
    def __call__(self, iteration: int) -> Iterator[None]:
        """Context of an iteration, which is recorded where it is selected."""
        if iteration not in self._iterations:
            yield
            return
        # GPU: traces have the kernels too.
        # GPU-TEST: tests/monitor/test_profile.py::test_job_writes_traces_of_selected_iterations
        # GPU-RAN: not yet
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        if self._memory:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        try:
            with profile(activities=activities) as recorded:
                yield
            self._write(iteration, recorded)
        finally:
            if self._memory:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, iteration: int, recorded: profile) -> None:
        name = f"iteration-{iteration:06d}-rank-{self._rank}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._folder / f"{name}.json.gz") as trace:
                recorded.export_chrome_trace(str(trace))
            if self._memory:
                with replacing(self._folder / f"{name}-memory.pickle") as snapshot:
                    torch.cuda.memory._dump_snapshot(str(snapshot))
        except (OSError, RuntimeError) as error:  # training continues without the trace
            log.warning("%s: no trace of iteration %d (%s)", self._folder, iteration, error)


def check_monitoring(config: Config, ranks: int) -> None:
    """Checks trackers, alarms and profile; raises UserError before anything is built."""
    check_services(config.tracking.services)
    check_alarms(config.alarm)
    check_profile(config.profile, ranks, config.job.iterations)


class RunLogger:
    """Writes metrics, samples and timelines of a job from iteration `first` on; rank 0 writes shared files."""

    def __init__(
        self, recipe: str, job: RunningJob, status: StatusFile, first: int, endpoint: Tracker, writer: RecordWriter
    ) -> None:
        config, rank = job.config, dist.get_rank()
        self._job, self._output, self._status, self._writer = (job, config.job.folder, status, writer)
        if rank == 0:
            _warn_dropped_prompts(job)
        first_step = first if first > 1 else 0  # a new run also logs step 0, the evaluation before training
        self._trackers = build_trackers(recipe, config, job.timer, first_step) if rank == 0 else []
        self._endpoint = endpoint
        self._alarms = Alarms(config.alarm, run_name(config), self._output / METRICS, first_step) if rank == 0 else None
        self.stop_reason = ""
        self._samples = _sample_writer(job, recipe) if "rollout" in job.requested else None
        runners = [role.runner for role in job.roles.values()]
        self._throughput, self._resources, self._peak = (Throughput(runners), ResourceSampler(), device_peak())
        self._profile, self._traced = (Profile(job.timer), TorchProfile(config.profile, self._output, rank))
        self._timeline = Timeline(self._output / TIMELINE, rank, job.timer, first)
        self._started, self._version = 0.0, 0
        self._table: SampleTable | None = None  # of the thread "records"

    def traced(self, iteration: int) -> AbstractContextManager[None]:
        """Context of an iteration, which starts now."""
        self._started = time.perf_counter()
        # Of the policy that this iteration trains, for the staleness: afterwards it is a later one.
        self._version = self._job.actor.num_updates if self._samples else 0
        return self._traced(iteration)

    def iteration(self, iteration: int) -> dict[str, float]:
        """Records the samples of an iteration, and returns its metrics; only metrics of time differ between ranks."""
        produced = self._job.rollout.train_batches if self._samples else []
        with self._job.timer("logging"):
            self._writer.flush()
            report: dict[str, Mapping[str, float]] = {"counts": self._throughput.take(produced)}
            report["measured"] = self._resources.take()
            if self._samples:
                report["rollout"] = rollout_sums(produced, self._version)
                report["mismatch"] = mismatch_statistics(self._job.actor.trained_batches)
            # One exchange of everything that is measured.
            reports = all_gather_json(report)
            metrics: dict[str, float] = {}
            if self._samples:
                agents = self._job.config.rollout.agent_names
                metrics = rollout_metrics([report["rollout"] for report in reports], agents)
                metrics |= self._job.rollout.metrics
                metrics |= mismatch_metrics([report["mismatch"] for report in reports])
                for batch in produced:
                    metrics |= self._job.observe(batch)
                self._write_samples(self._samples, iteration, produced)
        seconds = time.perf_counter() - self._started
        times = {"time/iteration": seconds} | rates([report["counts"] for report in reports], seconds, self._peak)
        times |= over_ranks([report["measured"] for report in reports])
        times |= weight_sync_rate(metrics, dist.get_world_size())
        return metrics | times | self._profile.iteration()

    def _write_samples(self, writer: SampleWriter, iteration: int, produced: Sequence[Batch]) -> None:
        # Batches as they are now, once each, since the next iteration may change those that the recipe has kept.
        rollout, trained = self._job.rollout, self._job.trained_batches
        every = [*(record.batch for record in rollout.records), *trained, *produced]
        now = {id(batch): as_of_now(batch) for batch in {id(batch): batch for batch in every}.values()}
        records = [replace(record, batch=now[id(record.batch)]) for record in rollout.records]
        self._writer.write(partial(writer.write, iteration, records, [now[id(batch)] for batch in trained]))
        # Only rank 0, with rows that it has, so no collective is needed.
        if limit := self._job.config.tracking.samples if dist.get_rank() == 0 else 0:
            self._writer.write(partial(self._make_table, [now[id(batch)] for batch in produced], limit, iteration))

    def _make_table(self, produced: Sequence[Batch], limit: int, iteration: int) -> None:
        self._table = sample_table(produced, limit, iteration, self._job.sample_texts)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Logs the metrics of an iteration that is done, or of the evaluation before the first as step 0."""
        self._profile.discard()  # the evaluation
        with self._job.timer("logging"):
            self._endpoint.log(step, metrics)
            if self._alarms and metrics:
                self.stop_reason = self._alarms.check(step, metrics) or self.stop_reason
        self._writer.write(partial(self._write, step, dict(metrics), self._timeline.line(step) if step else ""))

    def _write(self, step: int, metrics: dict[str, float], timeline: str) -> None:
        for tracker in self._trackers if metrics else ():  # step 0 without an evaluation has no metrics
            tracker.log(step, metrics, self._table)
        self._table = None
        if step:
            self._status.log(step, metrics)
            self._timeline.write(timeline)

    def close(self) -> None:
        """Closes trackers and alarms, and prints the summary on rank 0; collective."""
        self._writer.flush()
        self._resources.close()
        phases = self._profile.table(self._job.config.profile.synchronize)
        for tracker in self._trackers:
            tracker.close()
        if self._alarms:
            self._alarms.close()
        if dist.get_rank() == 0:
            curve = plot_reward_curve(self._output / METRICS, self._output / CURVE)
            place = self._job.config.job.output
            pictures = f", curve {place / CURVE}, samples {place / SAMPLES}" if curve else ""
            print(summary(read_lines(self._output / METRICS)), phases, sep="\n")
            print(f"metrics {place / METRICS}{pictures}", flush=True)


def sample_table(batches: Sequence[Batch], limit: int, iteration: int, texts: SampleTexts) -> SampleTable | None:
    """Makes a table for services of at most `limit` samples of this rank; None without samples."""
    # Equally far apart, since neighbours have the same prompt.
    # Of an agent's sample the last row, which contains the whole conversation unless it was rewritten.
    samples = [(batch, int(row)) for batch in batches for row in batch.last_rows]
    shown = [samples[i * len(samples) // limit] for i in range(limit)] if limit < len(samples) else samples
    names = dict.fromkeys(name for batch in batches for name in batch.names() if name.startswith(PART))
    columns = ("iteration", "prompt", "response", "answer", "reward", *(name.removeprefix(PART) for name in names))
    rows: list[list[str | float | None]] = []
    for batch, row in shown:
        sample = texts.of_row(batch, row)
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
    about = FileMetadata(recipe, model, dist.get_world_size(), agents=tuple(config.rollout.agent_names))
    folder, limit = config.job.folder / SAMPLES, config.record.samples_per_rank
    return SampleWriter(folder, dist.get_rank(), about, job.sample_texts, limit)


def _warn_dropped_prompts(job: RunningJob) -> None:
    for which, prompts in (("train", job.prompts), ("test", job.test_prompts)):
        if prompts is not None and prompts.dropped:
            limit = job.config.data.max_prompt_tokens
            log.warning("data.%s: %d prompts of more than %d tokens are dropped", which, prompts.dropped, limit)
