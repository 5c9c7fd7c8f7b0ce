"""Checkpoints on disk: written in a thread while training continues, checked before a resume, pruned.

A checkpoint is a folder named by its iteration, with a file of each rank, an index of their boxes, the state of the
job, and the SHA-256 sums of all these files in SHA256SUMS. It is written under a name that ends in `.partial` and
renamed when it is complete, so a crash leaves no half of one.

    each rank, main thread     begin: copy to host ─▶ next iteration ... ─▶ begin or finish: wait for the thread
                                        │                                                        ▲
    each rank, thread                   └─▶ file of the rank ─▶ gather sums and index ─┬─▶ end ──┘
    "checkpoint"                                                                       │
                                                   rank 0: index, SHA256SUMS, rename, prune

    000020.partial ─┬─ complete ─▶ 000020 ─┬─ older than `checkpoint.keep`, not the best ─▶ removed
                    │                      └─ a sum differs ─▶ skipped by `newest_intact`, replaced by the next 000020
                    └─ error, or found at the next start ─▶ removed
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from verl_mg.checkpoint.sharded_safetensors import INDEX, index_entry, rank_file, write_tensors
from verl_mg.config import CheckpointConfig
from verl_mg.distributed.collectives import all_gather_json, broadcast_json, gather_bytes, new_group
from verl_mg.errors import UserError
from verl_mg.job.job import RunningJob
from verl_mg.run.job_state import JOB, CheckpointState, StateCollector, read_state

SUMS = "SHA256SUMS"  # file with the sums of all others, in the format of `sha256sum`
PARTIAL = ".partial"  # ending of the name of a checkpoint that is being written
_RANK_FILE = re.compile(r"rank-(\d+)\.safetensors")
_SUM_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")

log = logging.getLogger(__name__)


class AsyncCheckpointer:
    """Writes checkpoints into a folder. Every rank has one, and all call its methods together."""

    def __init__(self, folder: Path, config: CheckpointConfig, recipe: str, latest: int | None = None) -> None:
        self._folder, self._config, self._recipe, self.latest = folder, config, recipe, latest
        # A separate group, in which the threads of the ranks meet no other collectives: all ranks have to call the
        # collectives of a group in the same order, and the threads are not in step with training.
        self._group = new_group(None, "gloo")
        self._collector = StateCollector()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._problem = ""
        if dist.get_rank() == 0:
            for unfinished in folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(unfinished, ignore_errors=True)

    def due(self, iteration: int, last: int) -> bool:
        """Returns whether a checkpoint is to be written."""
        every = self._config.every
        return bool(every) and (iteration % every == 0 or iteration == last)

    def begin(self, job: RunningJob, metrics: dict[str, float]) -> None:
        """Copies the state of the job and writes it in a thread; `metrics` has the score for `checkpoint.best`."""
        # The thread of the checkpoint before still reads the buffers that `collect` fills.
        self._join()
        best = self._config.best
        if best and best not in metrics and dist.get_rank() == 0:
            log.warning("checkpoint.best=%s: iteration %d has no such metric, it is never best", best, job.iteration)
        contents = self._collector.collect(job, self._recipe, metrics.get(best) if best else None)
        self._thread = threading.Thread(target=self._run, args=(contents,), daemon=True, name="checkpoint")
        self._thread.start()

    def finish(self) -> str:
        """Waits until the checkpoint is written; returns why it could not be, or "", the same on every rank."""
        self._join()
        # Only rank 0 renames, so only it knows.
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
        except BaseException as error:  # raised again by the thread that joins this one
            self._error = error

    def _write(self, contents: CheckpointState) -> None:
        iteration = contents.job.iteration
        folder = self._folder / f"{iteration:06d}"
        partial = folder.with_name(folder.name + PARTIAL)
        try:
            report = {"digests": _write_local(partial, contents), "problem": ""}
        except OSError as error:
            # Reported, not raised: the other ranks wait in the collectives below.
            report = {"digests": {}, "problem": _reason(error, partial)}
        reports = all_gather_json(report, self._group)
        index = b"".join(gather_bytes(index_entry(dist.get_rank(), contents.tensors), self._group))
        problem = next((report["problem"] for report in reports if report["problem"]), "")
        if dist.get_rank() == 0:
            digests = {name: digest for report in reports for name, digest in report["digests"].items()}
            problem = problem or self._commit(partial, folder, digests, index)
            if problem:
                shutil.rmtree(partial, ignore_errors=True)
                newest = "there is none" if self.latest is None else f"the newest is that of iteration {self.latest}"
                log.warning("checkpoint of iteration %d not written: %s; %s", iteration, problem, newest)
            else:
                self.latest = iteration
            self._problem = problem

    def _commit(self, partial: Path, folder: Path, digests: dict[str, str], index: bytes) -> str:
        """Completes the folder and renames it, then removes older ones; returns why that failed, or ""."""
        try:
            digests[INDEX] = _write(partial / INDEX, index)
            sums = (f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
            _write(partial / SUMS, "".join(sums).encode())
            if folder.exists():  # a damaged one, after the run resumed from the one before
                shutil.rmtree(folder)
            os.replace(partial, folder)
            _fsync_folder(folder.parent)
        except OSError as error:
            return _reason(error, folder)
        # Last, so that a crash in between leaves one checkpoint more, never one less.
        _prune(folder.parent, folder, self._config.keep, self._config.best is not None)
        return ""


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder, the oldest first."""
    return sorted((path for path in folder.glob("*") if path.name.isdecimal()), key=lambda path: int(path.name))


def newest_intact(folder: Path, before: int | None = None) -> Path | None:
    """Returns the newest checkpoint whose files match their sums, or None where there is none.

    All ranks call it together and share the reading. Damaged checkpoints are logged and skipped; UserError where all
    are damaged.
    """
    # One listing for all: the checks of each name are collectives.
    names = broadcast_json([path.name for path in checkpoints_in(folder)] if dist.get_rank() == 0 else None)
    names = [name for name in names if before is None or int(name) < before]
    problem = ""
    for name in reversed(names):
        problem = _problem_of(folder / name)
        if not problem:
            return folder / name
        if dist.get_rank() == 0:
            log.warning("%s: skipped", problem)
    if problem:
        raise UserError(f"{problem}: no other checkpoint is intact. Move {folder} away to start from the beginning.")
    return None


# -- writing


def _write_local(folder: Path, contents: CheckpointState) -> dict[str, str]:
    """Writes this rank's files; returns their SHA-256 by name."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank()
    name = rank_file(rank)
    digests = {name: write_tensors(folder / name, contents.tensors)}
    if rank == 0:
        digests[JOB] = _write(folder / JOB, contents.job.model_dump_json().encode())
    return digests


def _write(path: Path, content: bytes) -> str:
    """Writes a file, which is on disk when this returns; returns its SHA-256."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def _fsync_folder(folder: Path) -> None:
    """Makes the renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: OSError, path: Path) -> str:
    return f"{error.filename or path}: {error.strerror or error}"


def _prune(folder: Path, newest: Path, keep: int | None, keep_best: bool) -> None:
    """Keeps the last `keep` checkpoints up to the newest, or all, and with `keep_best` that with the highest score."""
    # Checkpoints of later iterations are damaged, for the run resumed from one before: they do not count.
    paths = [path for path in checkpoints_in(folder) if int(path.name) <= int(newest.name)]
    kept = set(paths[-keep:] if keep else paths)
    if keep_best:
        scores: dict[Path, float] = {}
        for path in paths:
            with suppress(UserError):  # a damaged one has no score
                scores |= {} if (score := read_state(path).score) is None else {path: score}
        kept |= {max(scores, key=lambda path: (scores[path], path.name))} if scores else set()
    for path in paths:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


# -- integrity


def _problem_of(folder: Path) -> str:
    """Returns what is wrong with a checkpoint, the same on every rank, or ""; ranks share the files."""
    digests: dict[str, str] = {}
    problem = ""
    if dist.get_rank() == 0:
        try:
            digests = _read_sums(folder)
        except UserError as error:
            problem = str(error)
    digests = broadcast_json(digests)
    names = (name for name in sorted(digests) if _checking_rank(name, dist.get_world_size()) == dist.get_rank())
    problem = problem or next((text for name in names if (text := _check_file(folder / name, digests[name]))), "")
    return next((text for text in all_gather_json(problem) if text), "")


def _checking_rank(name: str, ranks: int) -> int:
    """Returns the rank that checks a file: the one that reads it under the layout that wrote it."""
    match = _RANK_FILE.fullmatch(name)
    return int(match[1]) % ranks if match else 0


def _read_sums(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / SUMS}: cannot be read ({error})") from None
    matches = [_SUM_LINE.fullmatch(line) for line in lines]
    digests = {match[2]: match[1] for match in matches if match}
    if len(digests) != len(lines) or JOB not in digests:
        raise UserError(f"{folder / SUMS}: not the sums of a checkpoint")
    if INDEX not in digests:
        raise UserError(f"{folder / SUMS}: {INDEX} is missing, the checkpoint was written by an earlier version")
    for name in map(rank_file, range(read_state(folder).ranks)):
        if name not in digests:
            raise UserError(f"{folder / SUMS}: {name} is missing")
    return digests


def _check_file(path: Path, digest: str) -> str:
    try:
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    return "" if actual == digest else f"{path}: damaged, its SHA-256 is not that of {SUMS}"
