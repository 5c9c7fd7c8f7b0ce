"""Checkpoints of a run: written in a thread while training continues, checked before a resume, pruned.

A checkpoint is a folder named by its iteration, with a file of each rank, an index of their boxes, the state of the
job, and the SHA-256 sums of all these files in SHA256SUMS. It is complete or absent (`verl_mg.stores.folders`), on a
file system or an object store, so a crash leaves no half of one.

    each rank, main thread     begin: copy to host ─▶ next iteration ... ─▶ begin or finish: wait for the thread
                                        │                                                        ▲
    each rank, thread                   └─▶ file of the rank ─▶ gather sums and index ─┬─▶ end ──┘
    "checkpoint"                                                                       │
                                                         rank 0: index, commit, prune

    being written ─┬─ complete ─▶ 000020 ─┬─ older than `checkpoint.keep`, not the best ─▶ removed
                   │                      └─ a sum differs ─▶ skipped by `newest_intact`, replaced by the next 000020
                   └─ error, or found at the next start ─▶ removed
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from verl_mg.checkpoint.sharded_safetensors import INDEX, index_entry, rank_file, tensor_blocks
from verl_mg.config import CheckpointConfig
from verl_mg.distributed.collectives import all_gather_json, broadcast_json, gather_bytes, new_group, raised_together
from verl_mg.errors import UserError
from verl_mg.job.job import RunningJob
from verl_mg.run.job_state import JOB, CheckpointState, StateCollector, read_state
from verl_mg.stores.folders import SUMS, Folders, StoredFile, StoredFolder, UnreadableError

_RANK_FILE = re.compile(r"rank-(\d+)\.safetensors")
_SUM_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")

log = logging.getLogger(__name__)


class AsyncCheckpointer:
    """Writes checkpoints. Every rank has one, and all call its methods together.

    `before_commit` is called on each rank, in the thread, before a checkpoint is complete.
    """

    def __init__(
        self,
        folders: Folders,
        config: CheckpointConfig,
        recipe: str,
        latest: int | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self._folders, self._config, self._recipe, self.latest = folders, config, recipe, latest
        self._before_commit = before_commit
        # A separate group, in which the threads of the ranks meet no other collectives: all ranks have to call the
        # collectives of a group in the same order, and the threads are not in step with training.
        self._group = new_group(None, "gloo")
        self._collector = StateCollector()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._problem = ""
        if dist.get_rank() == 0:
            with suppress(OSError):  # what remains is not complete, and is written over
                folders.remove_unfinished()

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
        name = f"{iteration:06d}"
        files: dict[str, StoredFile] = {}
        problem = ""
        try:
            files = self._write_local(name, contents)
            self._before_commit()
        except OSError as error:
            # Reported, not raised: the other ranks wait in the collectives below.
            problem = self._reason(error, name)
        reports = all_gather_json({"files": files, "problem": problem}, self._group)
        index = b"".join(gather_bytes(index_entry(dist.get_rank(), contents.tensors), self._group))
        problem = next((report["problem"] for report in reports if report["problem"]), "")
        if dist.get_rank() == 0:
            files = {name: StoredFile(*file) for report in reports for name, file in report["files"].items()}
            problem = problem or self._commit(name, files, index)
            if problem:
                newest = "there is none" if self.latest is None else f"the newest is that of iteration {self.latest}"
                log.warning("checkpoint of iteration %d not written: %s; %s", iteration, problem, newest)
                with suppress(OSError):
                    self._folders.remove_unfinished()
            else:
                self.latest = iteration
            self._problem = problem

    def _write_local(self, folder: str, contents: CheckpointState) -> dict[str, StoredFile]:
        """Writes this rank's files."""
        name = rank_file(dist.get_rank())
        files = {name: self._folders.write(folder, name, tensor_blocks(contents.tensors))}
        if dist.get_rank() == 0:
            files[JOB] = self._folders.write(folder, JOB, [contents.job.model_dump_json().encode()])
        return files

    def _commit(self, name: str, files: dict[str, StoredFile], index: bytes) -> str:
        """Completes the folder, then removes older ones; returns why that failed, or ""."""
        try:
            files[INDEX] = self._folders.write(name, INDEX, [index])
            self._folders.commit(name, files)
        except OSError as error:
            return self._reason(error, name)
        # Last, so that a crash in between leaves one checkpoint more, never one less.
        try:
            _prune(self._folders, name, self._config.keep, self._config.best is not None)
        except (OSError, UnreadableError) as error:
            reason = getattr(error, "strerror", None) or error
            log.warning("%s: old checkpoints are not removed (%s)", self._folders, reason)
        return ""

    def _reason(self, error: OSError, name: str) -> str:
        return f"{error.filename or f'{self._folders}/{name}'}: {error.strerror or error}"


def checkpoints_in(folders: Folders) -> list[str]:
    """Returns the names of the complete checkpoints, the oldest first."""
    return sorted((name for name in folders.complete() if name.isdecimal()), key=int)


def newest_intact(folders: Folders, before: int | None = None) -> StoredFolder | None:
    """Returns the newest checkpoint whose files match their sums, or None where there is none.

    All ranks call it together and share the reading. Damaged checkpoints are logged and skipped; UserError where all
    are damaged, or one cannot be read now.
    """
    # One listing for all: the checks of each name are collectives.
    names = broadcast_json(_listed(folders) if dist.get_rank() == 0 else None)
    names = [name for name in names if before is None or int(name) < before]
    problem = ""
    for name in reversed(names):
        folder = folders.open(name)
        problem = _problem_of(folder)
        if not problem:
            return folder
        if dist.get_rank() == 0:
            log.warning("%s: skipped", problem)
    if problem:
        raise UserError(f"{problem}: no other checkpoint is intact. Move {folders} away to start from the beginning.")
    return None


def _listed(folders: Folders) -> list[str]:
    try:
        return checkpoints_in(folders)
    except OSError as error:
        raise UserError(f"{folders}: cannot be read ({error.strerror}). Set job.output to what can be.") from None


def _prune(folders: Folders, newest: str, keep: int | None, keep_best: bool) -> None:
    """Keeps the last `keep` checkpoints up to the newest, or all, and with `keep_best` that with the highest score."""
    # Checkpoints of later iterations are damaged, for the run resumed from one before: they do not count.
    names = [name for name in checkpoints_in(folders) if int(name) <= int(newest)]
    kept = set(names[-keep:] if keep else names)
    if keep_best:
        scores: dict[str, float] = {}
        for name in names:
            try:
                scores |= {} if (score := read_state(folders.open(name)).score) is None else {name: score}
            except UnreadableError:
                raise
            except UserError:  # a damaged one has no score
                continue
        kept |= {max(scores, key=lambda name: (scores[name], name))} if scores else set()
    for name in names:
        if name not in kept:
            folders.remove(name)


# -- integrity


def _problem_of(folder: StoredFolder) -> str:
    """Returns what is wrong with a checkpoint, the same on every rank, or ""; ranks share the files."""
    digests: dict[str, str] = {}
    problem = ""
    # A store that is lost for minutes must not cost the newest checkpoints.
    with raised_together(UnreadableError):
        if dist.get_rank() == 0:
            try:
                digests = _read_sums(folder)
            except UnreadableError:
                raise
            except UserError as error:
                problem = str(error)
    digests = broadcast_json(digests)
    names = (name for name in sorted(digests) if _checking_rank(name, dist.get_world_size()) == dist.get_rank())
    with raised_together(UnreadableError):
        problem = problem or next((text for name in names if (text := folder.problem_of(name, digests[name]))), "")
    return next((text for text in all_gather_json(problem) if text), "")


def _checking_rank(name: str, ranks: int) -> int:
    """Returns the rank that checks a file: the one that reads it under the layout that wrote it."""
    match = _RANK_FILE.fullmatch(name)
    return int(match[1]) % ranks if match else 0


def _read_sums(folder: StoredFolder) -> dict[str, str]:
    place = f"{folder}/{SUMS}"
    try:
        lines = folder.file(SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{place}: cannot be read ({error})") from None
    matches = [_SUM_LINE.fullmatch(line) for line in lines]
    digests = {match[2]: match[1] for match in matches if match}
    if len(digests) != len(lines) or JOB not in digests:
        raise UserError(f"{place}: not the sums of a checkpoint")
    if INDEX not in digests:
        raise UserError(f"{place}: {INDEX} is missing, the checkpoint was written by an earlier version")
    for name in map(rank_file, range(read_state(folder).ranks)):
        if name not in digests:
            raise UserError(f"{place}: {name} is missing")
    return digests
