"""The state of a job in a checkpoint: collected after an iteration, restored into a job that was just built.

    job.json                  `JobState`, which all ranks know: iteration, prompt feed, counters
    rank-00003.safetensors    tensors of one rank:
      actor/exp_avg|model.layers.0.mlp.down_proj.weight|0:64,32:64    boxes of weights and moments, see
                                                                      `verl_mg.checkpoint.sharded_safetensors`
      batch/state.buffer/lengths, batch/state.buffer/columns/tokens   a batch that the recipe keeps in `job.state`
      batch/ready/...                                                 rows that were generated in advance
      routed_experts/partial/17, top/partial/17, images/KEY           of samples without a complete group
      random/torch, random/cuda, random/megatron/NAME                 generators
      state                                                           `RankState`, all else, as JSON text

Boxes fit any layout and number of ranks. `_restore_local` distributes the rest over the ranks of the resumed job.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from pydantic import Field, PositiveInt
from torch import Tensor

from verl_mg import device
from verl_mg.batch import Batch, ColumnKind
from verl_mg.checkpoint.sharded_safetensors import RankFile, ShardedReader, StoredBox, local_file
from verl_mg.config import Count
from verl_mg.distributed.collectives import broadcast_bytes
from verl_mg.distributed.watchdog import is_peer_failure
from verl_mg.engines.engine import Sample
from verl_mg.errors import UserError
from verl_mg.images import Image, distinct_images
from verl_mg.job.job import RunningJob
from verl_mg.jsonl import StoredRecord
from verl_mg.models.transformers_module import read_any_config
from verl_mg.roles.models import Reference, RoleCounters
from verl_mg.rollout.groups import RolloutState
from verl_mg.rollout.rollout import LocalRolloutState
from verl_mg.rows.samples import GeneratedRows
from verl_mg.run.sample_state import REPORTS, SampleState, images_of, reports_of
from verl_mg.stores.folders import StoredFolder

log = logging.getLogger(__name__)

JOB = "job.json"  # file with the `JobState`
READY = "ready"
"""Name of the batch that the rollout generated in advance; the names of all other batches begin with STATE."""
STATE = "state."  # prefix of the names of batches in `job.state`
RANK_STATE = "state"  # name of the tensor with the JSON text of a `RankState`
DAMAGED = "; the checkpoint is damaged"  # end of errors of a text that is no record
LENGTHS = "lengths"  # name of the tensor with a batch's lengths
IMAGES = "images/"  # prefix of the names of the tensors with the bytes of images, by key


class JobState(StoredRecord):
    """The state that all ranks know."""

    recipe: str  # name of the recipe
    iteration: Count  # number of the iteration after which the checkpoint was written
    ranks: PositiveInt  # number of ranks that have written files
    score: float | None  # metric that decides which checkpoint is the best, where there is one
    next_row: Count  # number of the next row of data that is used as it is
    prompts: dict[str, Any]  # state of the prompt feed
    test_records: dict[str, str] = Field(default_factory=dict)
    """Digests of the records of `data.test`, by the name of the set."""
    numbers: dict[str, float]  # numbers in `job.state`
    batches: list[str]  # names of the batches among the ranks' tensors
    trained: dict[str, RoleCounters]  # counters of the trained roles
    refreshed: list[str] = Field(default_factory=list)
    """Frozen roles that have taken other weights, which the files contain too."""
    rollout: RolloutState | None  # state of the rollout, if there is one


class NumpyState(StoredRecord):
    """The parts of `numpy.random.get_state()`, in its order."""

    bit_generator: str
    key: list[int]
    pos: int
    has_gauss: int  # whether a normal number is cached
    gauss: float


class RankState(StoredRecord):
    """State that only one rank has, without tensors."""

    completed: list[SampleState]  # complete samples whose groups have not been returned
    partial: list[SampleState]  # aborted samples
    conversations: dict[int, str] = Field(default_factory=dict)
    """Conversations of the rows that were generated in advance, by trajectory."""
    kinds: dict[str, dict[str, ColumnKind]]  # kind of each column, by batch and column
    images: dict[str, list[tuple[str, ...]]] = Field(default_factory=dict)
    """Keys of the images of each row, by batch, for batches with images."""
    python: tuple[int, tuple[int, ...], float | None]  # state of the generator of `random`
    numpy: NumpyState  # state of NumPy's generator


@dataclass
class CheckpointState:
    """Everything that this rank writes."""

    job: JobState
    tensors: dict[str, Tensor]
    """Tensors by key and the text of the `RankState`, on the host; they are not changed before they are written."""


@dataclass
class StateCollector:
    """Copies the state of a job into host memory, which the next checkpoint uses again."""

    _buffers: dict[str, Tensor] = field(default_factory=dict)

    def collect(self, job: RunningJob, recipe: str, score: float | None) -> CheckpointState:
        """Returns the state of a job after an iteration, with the `score` for `checkpoint.best`; a collective."""
        rollout = job.rollout if "rollout" in job.requested else None
        local = rollout.local_state() if rollout else LocalRolloutState()
        batches = {STATE + name: value for name, value in job.state.items() if isinstance(value, Batch)}
        batches |= {} if local.ready is None else {READY: local.ready.batch}
        state = JobState(
            recipe=recipe,
            iteration=job.iteration,
            ranks=dist.get_world_size(),
            score=score,
            next_row=job.next_row,
            prompts=job.prompts.state(),
            test_records=job.test_prompts.digests if job.test_prompts else {},
            numbers={name: value for name, value in job.state.items() if not isinstance(value, Batch)},
            batches=sorted(batches),
            trained={name: role.counts() for name, role in job.trained.items()},
            refreshed=sorted(job.refreshed),
            rollout=rollout.state() if rollout else None,
        )
        tensors: dict[str, Tensor] = {}
        trained = (role.parts() for role in job.trained.values())
        frozen = (role.parts() for role in job.refreshed.values())
        for part in chain(*trained, *frozen):
            tensors[part.key] = self._to_host(part.key, part.values)
        for key, values in _rank_tensors(batches, local):
            tensors[key] = self._to_host(key, values)
        # The copies read weights and moments until here; the next step changes them.
        device.synchronize()
        self._buffers = tensors
        # A tensor too, so that a rank has one file with one sum.
        text = _rank_state(batches, local).model_dump_json().encode()
        return CheckpointState(state, tensors | {RANK_STATE: torch.frombuffer(bytearray(text), dtype=torch.uint8)})

    def _to_host(self, key: str, values: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            buffer = device.host_buffer(values)
        return buffer.copy_(values, non_blocking=True)


def restore(job: RunningJob, folder: StoredFolder, recipe: str) -> int:
    """Restores a checkpoint, written under any layout and on any number of ranks; all ranks call it together.

    Returns the iteration after which it was written. UserError for a checkpoint of another recipe, and for files that
    do not fit each other or the job.
    """
    state, stored = _open(folder)
    if state.recipe != recipe:
        # Another recipe has other roles and another meaning of `job.state`.
        raise UserError(f"{folder}: written by the recipe {state.recipe}, not {recipe}. Choose another job.output.")
    if other := job.trained.keys() ^ state.trained.keys():
        raise UserError(f"{folder}: {min(other)} is trained in only one of the two runs. Choose another job.output.")
    try:
        job.prompts.load_state(state.prompts)
        for name, role in job.trained.items():
            if name == "actor":
                _load_actor(job, stored, state.trained[name])
            else:
                role.load(stored.fill, state.trained[name])
        for name in job.roles.keys() & state.refreshed:
            _refreshed_role(job, name, folder).load(stored.fill)
        _restore_local(job, stored, state)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:  # intact, but inconsistent
        if is_peer_failure(error):  # gloo raises RuntimeError where another rank has ended
            raise
        raise UserError(
            f"{folder}: its contents do not fit each other ({type(error).__name__}: {error}). Move it away to resume "
            "from the one before."
        ) from error
    _report_changed_tests(job, state, folder)
    job.iteration, job.next_row = state.iteration, state.next_row
    return state.iteration


def _load_actor(job: RunningJob, stored: ShardedReader, counts: RoleCounters) -> None:
    """Restores the actor: its weights from engines that have kept them, otherwise from the files with all else."""
    started = time.perf_counter()
    kept = job.kept_weights(counts.updates)

    def fill(part: StoredBox) -> None:
        if isinstance(kept, str) or not kept.fill(part):
            stored.fill(part)

    job.actor.load(fill, counts)
    if kept and dist.get_rank() == 0:
        source = f"read from the checkpoint, for {kept}" if isinstance(kept, str) else "taken back from the engines"
        log.warning("actor: weights %s, in %.2f s", source, time.perf_counter() - started)


def _report_changed_tests(job: RunningJob, state: JobState, folder: StoredFolder) -> None:
    # One line and no error: the training is the same, only its evaluations are of other prompts.
    now = job.test_prompts.digests if job.test_prompts and dist.get_rank() == 0 else {}
    for name in now:
        if state.test_records.get(name, now[name]) != now[name]:
            log.warning(
                "%s: the records of %s are others than when it was written: evaluations before and after do not "
                "compare. Restore the data files of the first run if they should",
                folder,
                f"data.test.{name}" if name else "data.test",
            )


def restore_actor(job: RunningJob, folder: StoredFolder) -> int:
    """Restores only the actor's weights, written under any layout, and returns their iteration; all ranks call it."""
    state, stored = _open(folder)
    if "actor" not in state.trained:
        raise UserError(f"{folder}: the recipe {state.recipe} trains no policy. Evaluate another run.")
    job.actor.load(stored.fill, state.trained["actor"])
    return state.iteration


def _open(folder: StoredFolder) -> tuple[JobState, ShardedReader]:
    """Returns the state of a checkpoint, as rank 0 has read it, and the reader of this rank's file; a collective."""
    rank = dist.get_rank()
    text = broadcast_bytes(_read(folder) if rank == 0 else b"")
    state = _parsed(text, folder)
    return state, ShardedReader(folder, rank if rank < state.ranks else None)


def _refreshed_role(job: RunningJob, name: str, folder: StoredFolder) -> Reference:
    role = job.roles[name]
    if not isinstance(role, Reference):
        raise UserError(
            f"{name}.refresh_every: {folder} has weights of a {name} that was refreshed. Set it as in the run before."
        )
    return role


def read_state(folder: StoredFolder) -> JobState:
    """Returns the contents of job.json; UserError where it cannot be read."""
    return _parsed(_read(folder), folder)


def _parsed(text: bytes, folder: StoredFolder) -> JobState:
    return JobState.parse(text, f"{folder}/{JOB}", DAMAGED)


def _restore_local(job: RunningJob, stored: ShardedReader, state: JobState) -> None:
    """Restores the states of ranks, distributed in turn where the job has another number of ranks."""
    # A checkpoint of 5 ranks on 2: rank 0 takes the states 0, 2 and 4, rank 1 the states 1 and 3. One of 2 ranks on 3:
    # rank 2 takes none, and has batches without rows with the columns of state 0.
    rank, world_size = dist.get_rank(), dist.get_world_size()
    numbers = list(range(rank, state.ranks, world_size))
    files = {n: stored.file(n) for n in numbers or [0]}
    texts = {n: file.tensor(RANK_STATE).numpy().tobytes() for n, file in files.items()}
    states = {n: RankState.parse(text, files[n].path, DAMAGED) for n, text in texts.items()}

    def load_batch(name: str) -> Batch:
        parts = [_load_batch(name, states[n], files[n]) for n in numbers]
        return Batch.concat(parts) if parts else _load_batch(name, states[0], files[0]).select([])

    batches = {name: load_batch(name) for name in state.batches}
    job.state = {**state.numbers, **{n.removeprefix(STATE): b for n, b in batches.items() if n != READY}}
    if state.rollout and "rollout" in job.requested:
        kept = [n for n, b in job.state.items() if isinstance(b, Batch) and "rollout_logprobs" in b]
        if kept and (changed := state.rollout.changed(job.rollout.drawn)):
            raise UserError(
                f"{', '.join(changed)}: the checkpoint has samples that were drawn in another way ({kept[0]}). Write "
                "what the run had before, or choose another job.output."
            )
        vocab_size = read_any_config(job.config.model.path).vocab
        completed: dict[int, Sample] = {}
        partial: dict[int, Sample] = {}
        for n in numbers:
            completed |= _load_samples("completed", states[n].completed, files[n], vocab_size)
            partial |= _load_samples("partial", states[n].partial, files[n], vocab_size)
        conversations = {i: text for n in numbers for i, text in states[n].conversations.items()}
        ready = GeneratedRows(batches[READY], conversations) if READY in batches else None
        local = LocalRolloutState(completed, partial, ready)
        job.rollout.load(state.rollout, local, job.prompts.by_id)
    # The state of a generator belongs to a rank: on more ranks than before some would have none.
    if state.ranks == world_size:
        _restore_random_numbers(states[rank], files[rank])


def _read(folder: StoredFolder) -> bytes:
    path = local_file(folder, JOB)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


# -- the state of one rank


def _rank_state(batches: Mapping[str, Batch], local: LocalRolloutState) -> RankState:
    state: Any = np.random.get_state(legacy=True)
    generator, key, pos, has_gauss, gauss = state
    return RankState(
        completed=[SampleState.of(sample) for sample in local.completed.values()],
        partial=[SampleState.of(sample) for sample in local.partial.values()],
        conversations=dict(local.ready.conversations) if local.ready else {},
        kinds={name: {column: batch.kind(column) for column in batch.names()} for name, batch in batches.items()},
        images={
            name: [tuple(image.key for image in row) for row in batch.images]
            for name, batch in batches.items()
            if batch.images is not None
        },
        python=random.getstate(),
        numpy=NumpyState(bit_generator=generator, key=key.tolist(), pos=pos, has_gauss=has_gauss, gauss=gauss),
    )


def _rank_tensors(batches: Mapping[str, Batch], local: LocalRolloutState) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that belong to a `RankState`, by key."""
    for name, batch in batches.items():
        yield f"batch/{name}/{LENGTHS}", batch.lengths
        yield from ((_column_key(name, column), batch[column]) for column in batch.names())
    for which, samples in (("completed", local.completed), ("partial", local.partial)):
        for sample in samples.values():
            yield from reports_of(which, sample).items()
    images = distinct_images(row for batch in batches.values() for row in batch.images or ())
    for sample in (*local.completed.values(), *local.partial.values()):
        images |= images_of(sample)
    for key, image in images.items():
        yield IMAGES + key, torch.frombuffer(bytearray(image.data), dtype=torch.uint8)
    yield "random/torch", torch.get_rng_state()
    # GPU: generators of the device and of megatron-core's regions are in checkpoints; on the CPU they are torch's
    # one.
    # GPU-TEST: tests/run/test_checkpoints.py::test_resume_under_the_same_layout_is_bitwise_identical
    # GPU-RAN: h200-1, h100-1
    if torch.cuda.is_available():
        yield "random/cuda", torch.cuda.get_rng_state()
        yield from ((f"random/megatron/{name}", state) for name, state in get_cuda_rng_tracker().get_states().items())


def _load_images(stored: RankFile) -> dict[str, Image]:
    """Returns the images of a rank's file by key."""
    return {key.removeprefix(IMAGES): Image(stored.tensor(key).numpy().tobytes()) for key in stored.keys(IMAGES)}


def _load_samples(which: str, states: Sequence[SampleState], stored: RankFile, vocab_size: int) -> dict[int, Sample]:
    """Returns samples by id; `which` is "completed" or "partial". ValueError for a token beyond the vocabulary."""
    reports = {key: stored.tensor(key) for name in REPORTS for key in stored.keys(f"{name}/{which}/")}
    images, samples = _load_images(stored), {}
    for state in states:
        if state.highest_token >= vocab_size:
            raise ValueError(f"sample {state.id} contains the token {state.highest_token}, the model has {vocab_size}")
        samples[state.id] = state.to_sample(which, reports, images)
    return samples


def _load_batch(name: str, state: RankState, stored: RankFile) -> Batch:
    batch = Batch(stored.tensor(f"batch/{name}/{LENGTHS}"))
    for column, kind in state.kinds[name].items():
        batch.put(column, stored.tensor(_column_key(name, column)), kind)
    if name in state.images:
        images = _load_images(stored)
        batch.images = [tuple(images[key] for key in row) for row in state.images[name]]
    return batch


def _restore_random_numbers(state: RankState, stored: RankFile) -> None:
    """Restores all generators of this process."""
    random.setstate(state.python)
    numbers = state.numpy
    key = np.array(numbers.key, dtype=np.uint32)
    np.random.set_state((numbers.bit_generator, key, numbers.pos, numbers.has_gauss, numbers.gauss))
    torch.set_rng_state(stored.tensor("random/torch"))
    # GPU: generators of the device and of megatron-core's regions are restored.
    # GPU-TEST: tests/run/test_checkpoints.py::test_resume_under_the_same_layout_is_bitwise_identical
    # GPU-RAN: h200-1, h100-1
    if torch.cuda.is_available() and stored.keys("random/cuda"):
        torch.cuda.set_rng_state(stored.tensor("random/cuda"))
        prefix = "random/megatron/"
        states = {key.removeprefix(prefix): stored.tensor(key) for key in stored.keys(prefix)}
        get_cuda_rng_tracker().set_states(states)


def _column_key(batch: str, column: str) -> str:
    return f"batch/{batch}/columns/{column}"
