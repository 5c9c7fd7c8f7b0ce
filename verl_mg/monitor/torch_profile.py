"""torch's profiler around selected iterations: traces for Perfetto, and memory snapshots."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from verl_mg.config import ProfileConfig
from verl_mg.errors import UserError
from verl_mg.jsonl import replacing
from verl_mg.layout import parse_ranks

log = logging.getLogger(__name__)

FOLDER = "profile"
MEMORY_EVENTS = 200_000  # number of latest allocations in a snapshot, each with its stack


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
