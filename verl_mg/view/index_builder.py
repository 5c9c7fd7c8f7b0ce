"""The process that builds the index of a run's samples and follows the run, until its parent ends.

python -m verl_mg.view.index_builder SAMPLES INDEX
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby, takewhile
from pathlib import Path

import pyarrow as pa

from verl_mg.view.index import PERIOD, TAIL, IterationFolders, current_segments, stored_segments
from verl_mg.view.rows import read_iteration
from verl_mg.view.segments import Segment, Versions

# Text of a segment. Larger ones are fewer files, but an iteration that is replaced builds its whole segment again.
SEGMENT_BYTES = 2**26
SMALL_SEGMENTS = 8  # consecutive segments of less text that are merged into one
SETTLED_SECONDS = 2.0  # age of a folder whose ranks have probably all written


class IndexBuilder:
    """Writes the segments of an index; one builder at a time."""

    def __init__(self, samples: Path, folder: Path) -> None:
        self._samples, self._folder, self._folders = samples, folder, IterationFolders(samples)
        self._stored: dict[str, Segment] = {}

    def update(self) -> None:
        """Adds what is new, removes what has been replaced, and merges small segments."""
        self._stored = stored_segments(self._folder, self._stored)
        versions = self._folders.versions()
        current = current_segments(self._stored.values(), versions)
        self._stored = {name: segment for name, segment in self._stored.items() if segment in current}
        for entry in self._folder.iterdir():
            if entry.is_dir() and entry.name not in self._stored:
                shutil.rmtree(entry)
        known = set().union(*(item.versions for item in self._stored.values()))
        # An iteration that some ranks are still writing would be built again for each of their files.
        settled = time.time_ns() - SETTLED_SECONDS * 1e9
        missing = [item for item, version in versions.items() if item not in known and version < settled]
        places = {iteration: place for place, iteration in enumerate(versions)}
        # Consecutive iterations only, so that segments do not overlap.
        for _, run in groupby(enumerate(missing), lambda pair: places[pair[1]] - pair[0]):
            iterations = [iteration for _, iteration in run]
            # The newest iterations wait until there are more; a gap between segments is filled.
            if len(iterations) > TAIL or iterations[-1] < max(known, default=0):
                self._add(iterations, versions)
        self._merge()

    def _add(self, iterations: Iterable[int], versions: Versions) -> None:
        """Writes iterations into segments of about SEGMENT_BYTES."""
        tables: dict[int, pa.Table] = {}
        size = 0
        for iteration in iterations:
            tables[iteration] = read_iteration(self._samples / f"{iteration:06d}")
            size += tables[iteration]["text"].nbytes
            if size >= SEGMENT_BYTES:
                self._write(tables, versions)
                tables, size = {}, 0
        if tables:
            self._write(tables, versions)

    def _write(self, tables: dict[int, pa.Table], versions: Versions) -> None:
        table = pa.concat_tables(tables.values())
        segment = Segment.of({iteration: versions[iteration] for iteration in tables}, table)
        target = segment.write(self._folder)
        self._stored[target.name] = Segment.open(target)

    def _merge(self) -> None:
        """Merges the newest small segments where they are many."""
        ordered = sorted(self._stored.items(), key=lambda item: item[1].first, reverse=True)
        small = list(takewhile(lambda item: item[1].text_bytes() < SEGMENT_BYTES // 2, ordered))
        if len(small) < SMALL_SEGMENTS:
            return
        merged: list[tuple[str, Segment]] = []
        size = 0
        for name, segment in small:
            size += segment.text_bytes()
            if merged and size > SEGMENT_BYTES:
                break
            merged.append((name, segment))
        merged.reverse()
        versions = {iteration: version for _, segment in merged for iteration, version in segment.versions.items()}
        table = pa.concat_tables([segment.table() for _, segment in merged])
        target = Segment.of(versions, table).write(self._folder)
        # After the merged one is complete: readers find each iteration in at least one segment.
        for name, _ in merged:
            if name != target.name:
                shutil.rmtree(self._folder / name)
                del self._stored[name]
        self._stored[target.name] = Segment.open(target)


def follow(samples: Path, folder: Path) -> None:
    """Builds an index and follows the run until the parent process ends, holding the lock that other viewers await."""
    parent = os.getppid()
    pa.set_cpu_count(1)
    with (folder / "lock").open("w") as lock:
        locked = False
        builder = IndexBuilder(samples, folder)
        while os.getppid() == parent:
            if not locked:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locked = True
            if locked:
                builder.update()
            time.sleep(PERIOD)


if __name__ == "__main__":
    try:
        follow(Path(sys.argv[1]), Path(sys.argv[2]))
    except OSError as problem:
        sys.exit(f"{sys.argv[2]}: the index cannot be written ({problem}); the view searches what is in it")
