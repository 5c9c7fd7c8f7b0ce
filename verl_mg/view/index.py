"""Index of the samples of a run: segments on disk, built by another process, and new iterations in memory.

    RUN/samples/ITERATION/rank-*.parquet
        |                                       |
    process index_builder, every PERIOD     threads of the server, in `segments` (one lock)
        |  writes, merges, removes              |  reads iterations that are in no segment, for READ_SECONDS
        v                                       v
    RUN/.view/FIRST-LAST-VERSION  ------>   _stored, and _recent: up to MEMORY_BYTES of text

A thread that builds would delay the answers of the server. Segments appear complete, by a rename, so readers need no
lock against the builder. Of several viewers of a run one builds, by a lock on a file. The index is in a temporary
folder where `.view` cannot be written; nothing else of the run is changed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from verl_mg.view.rows import read_iteration
from verl_mg.view.segments import Segment, Versions

FOLDER = ".view"  # folder of the index in the folder of a run
TAIL = 16  # newest iterations that may remain in memory: a segment of less would be merged too often
PERIOD = 2.0  # seconds between two looks at the run
READ_SECONDS = 0.5  # seconds that a request spends on iterations that are not in the index yet
MEMORY_BYTES = 2**27  # text of iterations that are kept in memory


class IterationFolders:
    """Folders of a run's iterations, and their versions: the time at which a file was added, renamed or removed."""

    # A run that replaces an iteration renames a new file of each rank, so the version changes.

    def __init__(self, samples: Path) -> None:
        self._samples = samples
        self._versions: dict[int, int] = {}
        self._looked = -PERIOD

    def iterations(self) -> list[int]:
        """Returns the iterations, in order."""
        try:
            return sorted(int(name) for name in os.listdir(self._samples) if name.isdecimal())
        except FileNotFoundError:
            return []

    def versions(self) -> dict[int, int]:
        """Returns the version of each iteration, in order; of those before the newest TAIL it may be PERIOD old."""
        iterations = self.iterations()
        now = time.monotonic()
        if now - self._looked >= PERIOD:
            self._versions, self._looked = {}, now
        # Ranks may still be writing the newest ones; of thousands of others the times are not read for each request.
        for iteration in iterations[-TAIL:]:
            self._versions.pop(iteration, None)
        versions: dict[int, int] = {}
        for iteration in iterations:
            with suppress(FileNotFoundError):
                known = self._versions.get(iteration)
                versions[iteration] = (
                    os.stat(f"{self._samples}/{iteration:06d}").st_mtime_ns if known is None else known
                )
        self._versions = versions
        return versions


class SampleIndex:
    """Segments of a run's samples; after `start` a process builds the segments on disk."""

    def __init__(self, samples: Path) -> None:
        self._samples, self._folders = samples, IterationFolders(samples)
        self._folder = samples.parent / FOLDER
        self._lock = threading.Lock()
        self._stored: dict[str, Segment] = {}
        self._recent: OrderedDict[tuple[int, int], Segment] = OrderedDict()
        self._builder: subprocess.Popen[bytes] | None = None
        self._temporary: Path | None = None

    def start(self) -> None:
        """Starts the process that builds the index, where there is more than fits in memory."""
        with self._lock:
            self._stored = stored_segments(self._folder, self._stored)
            versions = self._folders.versions()
            # A run of few iterations never gets an index on disk.
            if (
                self._builder is None
                and len(_missing(versions, current_segments(self._stored.values(), versions))) > TAIL
            ):
                if not _writable(self._folder):
                    self._temporary = self._folder = Path(tempfile.mkdtemp(prefix="verl-mg-view-"))
                command = [sys.executable, "-m", "verl_mg.view.index_builder", str(self._samples), str(self._folder)]
                self._builder = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def close(self) -> None:
        """Ends the process, and deletes a temporary index."""
        if self._builder is not None:
            self._builder.terminate()
            self._builder.wait()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def iterations(self) -> list[int]:
        """Returns the iterations with samples, in order."""
        return self._folders.iterations()

    def progress(self, segments: Iterable[Segment], first: int | None, last: int | None) -> dict[str, int]:
        """Returns for a range `iterations`, their number, and `indexed`, how many are in segments; None: no bound."""
        known = set().union(*(segment.versions for segment in segments))
        wanted = [iteration for iteration in self.iterations() if _overlaps(iteration, iteration, first, last)]
        return {"iterations": len(wanted), "indexed": len(known.intersection(wanted))}

    def segments(self, first: int | None, last: int | None) -> list[Segment]:
        """Returns the segments that overlap a range of iterations, in order."""
        # Iterations that are in none are read now, the newest first, as long as that is quick.
        with self._lock:
            self._stored = stored_segments(self._folder, self._stored)
            versions = self._folders.versions()
            current = current_segments(self._stored.values(), versions)
            missing = _missing(versions, current)
            deadline = time.monotonic() + READ_SECONDS
            for iteration in reversed([item for item in missing if _overlaps(item, item, first, last)]):
                key = (iteration, versions[iteration])
                if key not in self._recent:
                    table = read_iteration(self._samples / f"{iteration:06d}")
                    self._recent[key] = Segment.of({iteration: versions[iteration]}, table)
                self._recent.move_to_end(key)
                if time.monotonic() > deadline:  # after at least one, so that repeated requests come to an end
                    break
            recent = [self._recent[item] for item in missing.items() if item in self._recent]
            self._forget()
        overlapping = [item for item in (*current, *recent) if _overlaps(item.first, item.last, first, last)]
        return sorted(overlapping, key=lambda item: item.first)

    def _forget(self) -> None:
        """Drops the iterations that were used least recently, beyond MEMORY_BYTES of text."""
        total = sum(item.text_bytes() for item in self._recent.values())
        while total > MEMORY_BYTES and len(self._recent) > 1:
            total -= self._recent.popitem(last=False)[1].text_bytes()


def stored_segments(folder: Path, known: dict[str, Segment]) -> dict[str, Segment]:
    """Returns the segments of an index by name; `known` ones are not opened again, damaged ones are left out."""
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.name[0].isdecimal())
    except OSError:
        return {}
    stored: dict[str, Segment] = {}
    for name in names:
        with suppress(OSError, ValueError, KeyError, TypeError, pa.ArrowException):
            stored[name] = known[name] if name in known else Segment.open(folder / name)
    return stored


def current_segments(segments: Iterable[Segment], versions: Versions) -> list[Segment]:
    """Returns the segments of which nothing has changed since; of segments with the same iterations the largest."""
    # A merged segment and its parts are both there until the parts are deleted.
    current: list[Segment] = []
    known: set[int] = set()
    for segment in sorted(segments, key=lambda item: len(item.versions), reverse=True):
        unchanged = all(versions.get(iteration) == version for iteration, version in segment.versions.items())
        if unchanged and known.isdisjoint(segment.versions):
            current.append(segment)
            known.update(segment.versions)
    return current


def _missing(versions: Versions, current: Iterable[Segment]) -> dict[int, int]:
    """Returns the iterations that are in no segment."""
    known = set().union(*(item.versions for item in current))
    return {iteration: version for iteration, version in versions.items() if iteration not in known}


def _overlaps(begin: int, end: int, first: int | None, last: int | None) -> bool:
    return (first is None or end >= first) and (last is None or begin <= last)


def _writable(folder: Path) -> bool:
    """Returns whether an index can be written to a folder, which is created."""
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # not on every network file system
        return True
    except OSError:
        return False
