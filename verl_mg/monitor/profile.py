"""Time per phase of the iterations: the table over all ranks, and the timeline of each rank for `verl-mg view`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from verl_mg.config import ProfileConfig
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.errors import UserError
from verl_mg.jsonl import keep_before, replacing
from verl_mg.layout import parse_ranks
from verl_mg.phase_timer import COMPUTE_PHASES, WAIT, PhaseTimer

log = logging.getLogger(__name__)

INEXACT = "A phase can include waiting for the work of another one; profile.synchronize=true separates them."
WARMUP_ITERATIONS = 1
"""First iterations, which are excluded where there are more: they include planning and compilation."""
FOLDER = "profile"
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

    # An iteration starts where the line of the previous one was written, so evaluation and logging belong to it.

    def __init__(self, folder: str | Path, rank: int, timer: PhaseTimer, first_step: int | None = None) -> None:
        self._path, self._timer, self._failed = Path(folder) / f"rank-{rank}.jsonl", timer, False
        self._begin()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                keep_before(self._path, "iteration", first_step)
        except OSError as error:
            self._disable(error)

    def write(self, iteration: int) -> None:
        """Writes the line of an iteration that is done."""
        start, zero = self._start, self._zero
        spans = [
            (phase, round(begin - zero, 6), round(end - zero, 6)) for phase, begin, end in self._timer.take_spans()
        ]
        self._begin()
        if self._failed:
            return
        line = json.dumps({"iteration": iteration, "start": start, "spans": spans})
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
    if config.memory and not torch.cuda.is_available():
        raise UserError("profile.memory=true: only GPU memory is recorded, and there is no GPU. Remove it.")


class TorchProfile:
    """Writes traces of the selected iterations and ranks to RUN/profile."""

    def __init__(self, config: ProfileConfig, output: Path, rank: int) -> None:
        self._iterations = set(config.iterations) if rank in parse_ranks(config.ranks) else set()
        self._memory, self._folder, self._rank = config.memory, output / FOLDER, rank

    @contextmanager
    def __call__(self, iteration: int) -> Iterator[None]:
        """Context of an iteration, which is recorded where it is selected."""
        if iteration not in self._iterations:
            yield
            return
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
        try:
            self._export(f"iteration-{iteration:06d}-rank-{self._rank}", recorded)
        except (OSError, RuntimeError) as error:  # training continues without the trace
            log.warning("%s: no trace of iteration %d (%s)", self._folder, iteration, error)

    def _export(self, name: str, recorded: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._folder / f"{name}.json.gz") as trace:
            recorded.export_chrome_trace(str(trace))
        if self._memory:
            with replacing(self._folder / f"{name}-memory.pickle") as snapshot:
                torch.cuda.memory._dump_snapshot(str(snapshot))
