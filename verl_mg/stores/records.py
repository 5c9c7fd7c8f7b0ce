"""Records of a run on an object store: metrics, samples, configuration, status, logs.

A store cannot append to an object. So a node writes its records into a local folder, as in a run on a disk, and a
thread puts each file that has changed as a whole: samples once, `metrics.jsonl` and `status.json` again and again.

    "records"    every POLL_SECONDS, and when `close` wakes it for the last time: changed files ─▶ objects
"""

from __future__ import annotations

import logging
import math
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from verl_mg.errors import UserError
from verl_mg.jsonl import replacing
from verl_mg.stores.bucket import CHECK_STORE, Bucket
from verl_mg.stores.url import ObjectUrl

POLL_SECONDS = 10.0
LARGE_BYTES = 2**24
"""Larger files that grow, such as logs, are put only with checkpoints and at the end."""
CHECKPOINTS, MODEL, EXPORTS = "checkpoints", "model", "export"  # folders of a run that are not records
STATUS = "status.json"  # the record that every run has
_NOT_RECORDS = tuple(f"{name}/" for name in (CHECKPOINTS, MODEL, EXPORTS))

log = logging.getLogger(__name__)


class RecordUpload:
    """Puts the files of a folder that change from now on; hidden ones are not records."""

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self._bucket, self._folder = bucket, folder
        self._seen = dict(self._files())
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._poll, daemon=True, name="records")

    def start(self) -> None:
        """Starts the thread that puts them."""
        self._thread.start()

    def upload(self, largest: float = math.inf) -> None:
        """Puts what has changed since the last time, in files of at most `largest` bytes; OSError where it cannot."""
        with self._lock:
            for path, state in self._files():
                if self._seen.get(path) != state and state[1] <= largest:
                    try:
                        content = path.read_bytes()  # not mapped: a file may be cut meanwhile
                    except FileNotFoundError:
                        continue
                    self._bucket.put(path.relative_to(self._folder).as_posix(), [content])
                    self._seen[path] = state

    def close(self) -> None:
        """Ends the thread and puts what has changed."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.upload()

    def _poll(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            try:
                self.upload(LARGE_BYTES)
            except OSError as error:  # the next time puts it
                log.warning("%s: not written (%s)", error.filename, error.strerror)

    def _files(self) -> Iterator[tuple[Path, tuple[int, int]]]:
        """Yields each record with its state."""
        # Before its content is read, so that what is written meanwhile is put again.
        for path in sorted(self._folder.rglob("*")):
            if any(part.startswith(".") for part in path.relative_to(self._folder).parts):
                continue
            with suppress(FileNotFoundError):  # it was removed meanwhile
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    yield path, (status.st_mtime_ns, status.st_size)


def is_record(name: str) -> bool:
    """Returns whether an object of a run, by its name, is no part of a checkpoint or model."""
    # Models of other roles have other names, and no other large files.
    return not name.startswith(_NOT_RECORDS) and not name.endswith(".safetensors")


def fetch_records(bucket: Bucket, folder: Path, wanted: Callable[[str], bool]) -> list[str]:
    """Copies the objects with a `wanted` name into a folder; returns the names of all that there are."""
    sizes = bucket.sizes()
    for name, size in sizes.items():
        # Whoever writes to the bucket chooses names: none may leave the folder, and the names of folders are no files.
        if wanted(name) and {"", ".", ".."}.isdisjoint(name.split("/")):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial:
                bucket.fetch(name, partial, size)
    return list(sizes)


@contextmanager
def run_folders(places: Sequence[str]) -> Iterator[list[Path]]:
    """Yields the local folders of runs; of those on an object store copies of their records as they are now."""
    with TemporaryDirectory(prefix="verl_mg-") as copies:
        yield [_run_folder(place, Path(copies, str(number))) for number, place in enumerate(places)]


def _run_folder(place: str, copy: Path) -> Path:
    try:
        url = ObjectUrl.parse(place)
    except ValueError as error:
        raise UserError(f"{place}: {error}.") from None
    if url is None:
        return Path(place)
    try:
        # One attempt: a wrong address is not to be waited for.
        if STATUS not in Bucket(url, "RUN", attempts=1).sizes():
            raise UserError(f"{place}: there is no run. Give the job.output of one.")
        fetch_records(Bucket(url, "RUN"), copy / url.name, is_record)
    except OSError as error:
        raise UserError(f"{place}: {error.strerror or error}. {CHECK_STORE}") from None
    return copy / url.name
