"""What of a job outlives its processes, and how it comes back."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import PositiveInt, ValidationError
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.checkpoint.sharded_safetensors import ShardedReader
from verl_mg.config import ConfigSection, Count
from verl_mg.distributed.watchdog import is_peer_failure
from verl_mg.errors import UserError
from verl_mg.job.job import Job
from verl_mg.models.hf_config import read_config
from verl_mg.roles.pending_groups import RolloutState
from verl_mg.roles.trainable import RoleCounters
from verl_mg.run import rank_files
from verl_mg.run.rank_files import RankState, rank_state, rank_tensors

JOB = "job.json"
READY = "ready"
"""The batch of a rollout that nobody has fetched yet, among those of `job.state`, whose names begin with STATE."""
STATE = "state."

S = TypeVar("S", bound=ConfigSection)


class JobState(ConfigSection):
    """What all ranks know. score: of the metric that decides which checkpoint is best, where there is one."""

    recipe: str
    iteration: Count
    ranks: PositiveInt
    score: float | None
    next_row: Count
    prompts: dict[str, Any]
    numbers: dict[str, float]
    batches: list[str]
    learned: dict[str, RoleCounters]
    rollout: RolloutState | None


@dataclass
class CheckpointState:
    """What this rank writes; `tensors` are on the host, and changed by nobody before they are written."""

    job: JobState
    rank: RankState
    tensors: dict[str, Tensor]


@dataclass
class StateCollector:
    """Takes the contents of a job, into memory that is used again."""

    _rooms: dict[str, Tensor] = field(default_factory=dict)

    def collect(self, job: Job, recipe: str, score: float | None) -> CheckpointState:
        """What the job is after its iteration; all ranks call it together."""
        rollout = job.rollout if "rollout" in job.requested else None
        done, cut, ready = rollout.kept if rollout else ({}, {}, None)
        batches = {STATE + name: value for name, value in job.state.items() if isinstance(value, Batch)}
        batches |= {} if ready is None else {READY: ready}
        state = JobState(
            recipe=recipe,
            iteration=job.iteration,
            ranks=dist.get_world_size(),
            score=score,
            next_row=job.next_row,
            prompts=job.prompts.state(),
            numbers={name: value for name, value in job.state.items() if not isinstance(value, Batch)},
            batches=sorted(batches),
            learned={name: role.counts() for name, role in job.trained.items()},
            rollout=rollout.state() if rollout else None,
        )
        kept: dict[str, Tensor] = {}
        for role in job.trained.values():
            for part in role.parts():
                kept[part.key] = self._on_host(part.key, part.values)
        for key, values in rank_tensors(batches, done, cut):
            kept[key] = self._on_host(key, values)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._rooms = kept
        return CheckpointState(state, rank_state(batches, done, cut), kept)

    def _on_host(self, key: str, values: Tensor) -> Tensor:
        room = self._rooms.get(key)
        if room is None or room.shape != values.shape or room.dtype != values.dtype:
            room = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        return room.copy_(values, non_blocking=True)


def restore(job: Job, folder: Path, recipe: str) -> int:
    """Bring a job that was just built to where the checkpoint was written; its iteration. All ranks call it together.

    Layouts and the number of ranks may be others than then. UserError where the checkpoint is of something else.
    """
    state = read_state(folder)
    if state.recipe != recipe:
        raise UserError(f"{folder}: written by the recipe {state.recipe}, now {recipe}; choose another job.output")
    if other := job.trained.keys() ^ state.learned.keys():
        raise UserError(f"{folder}: {min(other)} learns in one of the two runs alone; choose another job.output")
    try:
        job.prompts.load_state(state.prompts)
        with ShardedReader(_file(folder, number) for number in range(state.ranks)) as stored:
            for name, role in job.trained.items():
                role.load(stored.fill, state.learned[name])
        _restore_own(job, folder, state)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:  # whole, and yet not ours
        if is_peer_failure(error):
            raise
        raise UserError(
            f"{folder}: what stands in it does not go together ({type(error).__name__}: {error}); move it away to go "
            "on from the one before"
        ) from error
    job.iteration, job.next_row = state.iteration, state.next_row
    return state.iteration


def read_state(folder: Path) -> JobState:
    """What job.json says; UserError where it cannot be read."""
    return _read(folder / JOB, JobState)


def rank_name(rank: int) -> str:
    """Of a rank's files, without their endings."""
    return f"rank-{rank:05d}"


def _restore_own(job: Job, folder: Path, state: JobState) -> None:
    """Of more ranks than now, each takes what several had."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = list(range(rank, state.ranks, ranks))
    with ExitStack() as stack:
        files = {n: stack.enter_context(ShardedReader([_file(folder, n)])) for n in (*numbers, 0)}
        states = {n: _read(folder / f"{rank_name(n)}.json", RankState) for n in files}

        def batch(name: str) -> Batch:
            parts = [rank_files.batch(name, states[n], files[n]) for n in numbers]
            return Batch.concat(parts) if parts else rank_files.batch(name, states[0], files[0]).select([])

        batches = {name: batch(name) for name in state.batches}
        job.state = {**state.numbers, **{n.removeprefix(STATE): b for n, b in batches.items() if n != READY}}
        if state.rollout and "rollout" in job.requested:
            words = read_config(job.config.model.path).vocab
            done = {
                i: s for n in numbers for i, s in rank_files.samples("done", states[n].done, files[n], words).items()
            }
            cut = {i: s for n in numbers for i, s in rank_files.samples("cut", states[n].cut, files[n], words).items()}
            job.rollout.load(state.rollout, job.prompts.by_id, done, cut, batches.get(READY))
        if state.ranks == ranks:
            rank_files.restore_random_numbers(states[rank], files[rank])


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{rank_name(rank)}.safetensors"


def _read(path: Path, kind: type[S]) -> S:
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        why = problem["msg"].removeprefix("Value error, ")
        raise UserError(f"{path}: {where or 'the text'}: {why}; the checkpoint is damaged") from None
