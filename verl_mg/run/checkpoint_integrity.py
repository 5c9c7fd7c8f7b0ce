"""Which checkpoints there are, and which of them are whole."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from verl_mg.distributed.collectives import all_gather_json
from verl_mg.errors import UserError
from verl_mg.run.job_state import JOB, rank_name, read_state

SUMS = "SHA256SUMS"
PARTIAL = ".partial"
_LINE = re.compile(r"([0-9a-f]{64})  ([\w.-]+)")

log = logging.getLogger(__name__)


def all_of(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first; those that were not finished are none."""
    return sorted((path for path in folder.glob("*") if path.name.isdecimal()), key=lambda path: int(path.name))


def newest_intact(folder: Path, before: int | None = None) -> Path | None:
    """The newest checkpoint, of an iteration before that one, whose files are as they were written; None where there
    is none at all. All ranks call it together, and share the reading.

    A damaged one is told, and the one before it taken. UserError where all are damaged.
    """
    names = all_gather_json([path.name for path in all_of(folder)])[0]
    names = [name for name in names if before is None or int(name) < before]
    problem = ""
    for name in reversed(names):
        problem = _problem(folder / name)
        if not problem:
            return folder / name
        if dist.get_rank() == 0:
            log.warning("%s: left out", problem)
    if problem:
        raise UserError(f"{problem}; no other checkpoint is whole: move {folder} away to begin anew")
    return None


def sums(digests: Mapping[str, str]) -> str:
    """The text of SUMS, of SHA-256 by file."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def prune(folder: Path, newest: Path, keep: int, best: bool) -> None:
    """Leave the last `keep` checkpoints up to the newest and, if asked for, that with the highest score.

    Later ones than that just written were damaged when the run went on from one before: they stand in for none.
    """
    found = [path for path in all_of(folder) if int(path.name) <= int(newest.name)]
    kept = set(found[-keep:])
    if best:
        scores = {path: score for path in found if (score := _score(path)) is not None}
        kept |= {max(scores, key=lambda path: (scores[path], path.name))} if scores else set()
    for path in found:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _score(path: Path) -> float | None:
    try:
        return read_state(path).score
    except UserError:
        return None


def _problem(folder: Path) -> str:
    """What is wrong with a checkpoint, the same on every rank; "" where nothing is. Ranks share the files."""
    try:
        digests = _digests(folder)
        mine = sorted(digests)[dist.get_rank() :: dist.get_world_size()]
        found = next((text for text in (_wrong(folder / name, digests[name]) for name in mine) if text), "")
    except UserError as error:
        found = str(error)
    return next((text for text in all_gather_json(found) if text), "")


def _digests(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / SUMS}: cannot be read ({error})") from None
    found = [_LINE.fullmatch(line) for line in lines]
    digests = {line[2]: line[1] for line in found if line}
    if len(digests) != len(lines) or JOB not in digests:
        raise UserError(f"{folder / SUMS}: not the sums of a checkpoint")
    for number in range(read_state(folder).ranks):
        for name in (f"{rank_name(number)}.json", f"{rank_name(number)}.safetensors"):
            if name not in digests:
                raise UserError(f"{folder / SUMS}: lacks {name}")
    return digests


def _wrong(path: Path, digest: str) -> str:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    return "" if found == digest else f"{path}: damaged, its SHA-256 is not that of {SUMS}"
