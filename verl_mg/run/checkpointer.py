"""Writing checkpoints while training goes on."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from verl_mg.checkpoint.sharded_safetensors import write_tensors
from verl_mg.config import CheckpointConfig, ConfigSection
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.job.job import Job
from verl_mg.run.checkpoint_integrity import PARTIAL, SUMS, prune, sums
from verl_mg.run.job_state import JOB, CheckpointState, StateCollector, rank_name

SLOWEST = timedelta(hours=6)
"""Ranks wait so long for one whose disk is slow."""

log = logging.getLogger(__name__)


class AsyncCheckpointer:
    """Checkpoints in a folder. Every rank has one, and all call its methods together.

    latest: the iteration of the last one that is known to be written.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, recipe: str, latest: int | None = None) -> None:
        self._folder, self._config, self._recipe, self.latest = folder, config, recipe, latest
        # Of its own, so that the thread meets other ranks' threads alone.
        self._group = dist.new_group(backend="gloo", timeout=SLOWEST)
        self._collector = StateCollector()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._problem = ""
        if dist.get_rank() == 0:
            for left in folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(left, ignore_errors=True)

    def due(self, iteration: int, last: int) -> bool:
        """Whether a checkpoint is to be written after the iteration."""
        every = self._config.every
        return bool(every) and (iteration % every == 0 or iteration == last)

    def begin(self, job: Job, metrics: dict[str, float]) -> None:
        """Copy what the job is now, and write it in a thread."""
        self._join()
        best = self._config.best
        if best and best not in metrics and dist.get_rank() == 0:
            log.warning("checkpoint.best=%s: iteration %d has no such metric, it is never best", best, job.iteration)
        contents = self._collector.collect(job, self._recipe, metrics.get(best) if best else None)
        self._thread = threading.Thread(target=self._run, args=(contents,), daemon=True, name="checkpoint")
        self._thread.start()

    def finish(self) -> str:
        """Wait until what was begun is written; why it could not be, or "". The same on every rank."""
        self._join()
        return str(all_gather_json(self._problem)[0])

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread:
            thread.join()
        if self._error:
            raise self._error

    def _run(self, contents: CheckpointState) -> None:
        try:
            self._write(contents)
        except BaseException as error:  # belongs to the thread that joins this one
            self._error = error

    def _write(self, contents: CheckpointState) -> None:
        iteration = contents.job.iteration
        folder = self._folder / f"{iteration:06d}"
        partial = folder.with_name(folder.name + PARTIAL)
        try:
            written = {"digests": _write_own(partial, contents), "problem": ""}
        except OSError as error:
            written = {"digests": {}, "problem": _why(error, partial)}
        told = all_gather_json(written, self._group)
        problem = next((own["problem"] for own in told if own["problem"]), "")
        if dist.get_rank() == 0:
            digests = {name: digest for own in told for name, digest in own["digests"].items()}
            problem = problem or self._commit(partial, folder, digests)
            if problem:
                shutil.rmtree(partial, ignore_errors=True)
                stays = "none is there" if self.latest is None else f"that of iteration {self.latest} stays"
                log.warning("checkpoint of iteration %d not written: %s; %s", iteration, problem, stays)
            else:
                self.latest = iteration
            self._problem = problem

    def _commit(self, partial: Path, folder: Path, digests: dict[str, str]) -> str:
        """Make it a checkpoint, at once and whole; why that failed, or ""."""
        try:
            _write_text(partial / SUMS, sums(digests))
            if folder.exists():  # one that was damaged, and has been done again
                shutil.rmtree(folder)
            os.replace(partial, folder)
            _sync(folder.parent)
        except OSError as error:
            return _why(error, folder)
        prune(folder.parent, folder, self._config.keep, self._config.best is not None)
        return ""


def _write_own(folder: Path, contents: CheckpointState) -> dict[str, str]:
    """This rank's files; their SHA-256 by name."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank()
    name = rank_name(rank)
    digests = {f"{name}.safetensors": write_tensors(folder / f"{name}.safetensors", contents.tensors)}
    digests[f"{name}.json"] = _write_state(folder / f"{name}.json", contents.rank)
    if rank == 0:
        digests[JOB] = _write_state(folder / JOB, contents.job)
    return digests


def _write_state(path: Path, state: ConfigSection) -> str:
    text = state.model_dump_json()
    _write_text(path, text)
    return hashlib.sha256(text.encode()).hexdigest()


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Renames in it are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _why(error: OSError, path: Path) -> str:
    return f"{error.filename or path}: {error.strerror or error}"
