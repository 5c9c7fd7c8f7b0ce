"""The place of a run: on a file system all is in `job.output`, or on an object store.

    s3://bucket/runs/first/checkpoints/000020/    by each rank from its memory, without a copy on a disk
    s3://bucket/runs/first/model/, export/        put together in the local folder, whose files all ranks take in turn
    s3://bucket/runs/first/metrics.jsonl, ...     records, from the local folder (`verl_mg.stores.records`)

Of two starts of a run on different machines the second finds all in the store: the local folder is emptied at each.
"""

from __future__ import annotations

import mmap
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from verl_mg import device
from verl_mg.config import JobConfig
from verl_mg.distributed.collectives import all_gather_json, raised_together
from verl_mg.errors import UserError
from verl_mg.monitor.sample_schema import SAMPLES
from verl_mg.stores.bucket import CHECK_STORE, Bucket
from verl_mg.stores.folders import Content, Folders, LocalFolders, StoredFile
from verl_mg.stores.objects import MANIFEST, ObjectFolders
from verl_mg.stores.records import CHECKPOINTS, RecordUpload, fetch_records, is_record
from verl_mg.stores.url import ObjectUrl

_STAGING = ".staging"
# Records that a resumed run does not append to.
_COMPLETE = ("samples/", "profile/", "engines/", "tensorboard/", "stalls/")


class RunStore(ABC):
    """The place of a run. All ranks call its methods together, unless one says otherwise."""

    checkpoints: Folders

    @abstractmethod
    def open(self) -> None:
        """Makes the local folder, with the records that a resumed run appends to."""

    @abstractmethod
    def start(self, done: int) -> None:
        """Begins to keep records of the iterations after `done`; what is there of these is of an earlier start."""

    @abstractmethod
    def upload_records(self) -> None:
        """Stores the records that this rank keeps as they are now; OSError where it cannot. Any rank."""

    @abstractmethod
    def save(self, name: str, write: Callable[[Path], None]) -> None:
        """Stores the folder NAME that `write` writes on all ranks; OSError where it cannot."""

    @abstractmethod
    def close(self) -> None:
        """Stores the last records. Any rank."""

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


class LocalRun(RunStore):
    """A run in a folder on a file system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.checkpoints = LocalFolders(folder / CHECKPOINTS)

    def open(self) -> None:
        """Does nothing: the folder is made when it is known that the run may write there."""

    def start(self, done: int) -> None:
        """Does nothing: later records are replaced one by one."""

    def upload_records(self) -> None:
        """Does nothing: the records are where they are written."""

    def save(self, name: str, write: Callable[[Path], None]) -> None:
        """Lets `write` write the folder at its place."""
        (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(self._folder / name)

    def close(self) -> None:
        """Does nothing: all is at its place."""


class ObjectRun(RunStore):
    """A run on an object store, with a local folder on each node."""

    def __init__(self, url: ObjectUrl, saves: bool) -> None:
        self._url, self._folder, self._saves = url, url.working_folder, saves
        self._bucket = Bucket(url)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._is_first = self._rank % device.ranks_of_a_node(self._ranks) == 0
        self.checkpoints = ObjectFolders(Bucket(url / CHECKPOINTS), self._folder / f".{CHECKPOINTS}")
        self._names: list[str] = []
        self._upload: RecordUpload | None = None

    def open(self) -> None:
        """Empties the local folder and fetches records; UserError where one of the two cannot be read or written."""

        try:
            with raised_together(OSError):
                if self._is_first:
                    self._make_folder()
                    self._names = fetch_records(self._bucket, self._folder, _is_appended)
                    self._upload = RecordUpload(self._bucket, self._folder)
        except OSError as error:
            raise UserError(f"job.output: {error.filename or self._url}: {error.strerror}. {CHECK_STORE}") from None
        self._check_shared()

    def _make_folder(self) -> None:
        self._folder.parent.mkdir(mode=0o700, exist_ok=True)
        owner = self._folder.parent.stat().st_uid
        if owner != os.getuid():  # who could exchange what is trained
            raise PermissionError(1, "another user's folder; set TMPDIR to another one", str(self._folder.parent))
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(exist_ok=True)

    def _check_shared(self) -> None:
        # A file of the model has boxes of ranks of several nodes.
        if not self._saves or device.ranks_of_a_node(self._ranks) == self._ranks:
            return
        mark = self._folder / ".shared"
        if self._rank == 0:
            mark.touch()
        dist.barrier()
        if not all(all_gather_json(mark.exists())):
            raise UserError(
                f"job.output={self._url}: the model is put together in {self._folder.parent.parent}, which the nodes "
                "do not share. Set TMPDIR to a folder that they share, or job.save=false and checkpoint.export_every=0."
            )

    def start(self, done: int) -> None:
        """Removes samples of later iterations and parts of objects, and starts the thread of the records."""

        try:
            with raised_together(OSError):
                if self._rank == 0:
                    self._bucket.abort_uploads()
                    self._bucket.remove(name for name in self._names if _is_of_later_samples(name, done))
        except OSError as error:
            place = error.filename or self._url
            remedy = "The store has to allow that objects are removed."
            raise UserError(f"job.output: {place}: {error.strerror}. {remedy}") from None
        if self._upload:
            self._upload.start()

    def upload_records(self) -> None:
        """Stores the records of this node, on its first rank."""
        if self._upload:
            self._upload.upload()

    def save(self, name: str, write: Callable[[Path], None]) -> None:
        """Stores the folder, whose files the ranks take in turn."""
        staged = self._folder / _STAGING / name
        staged.parent.mkdir(parents=True, exist_ok=True)
        write(staged)
        folders, files = ObjectFolders(self._bucket, staged), dict[str, StoredFile]()
        paths = sorted(path for path in staged.rglob("*") if path.is_file())

        try:
            with raised_together(OSError):
                if self._rank == 0:  # a model of the same name is not complete from here on
                    self._bucket.remove([f"{name}/{MANIFEST}"])
            with raised_together(OSError):
                for path in paths[self._rank :: self._ranks]:
                    file = path.relative_to(staged).as_posix()
                    files[file] = folders.write(name, file, _content_of(path))
            reports = all_gather_json(files)
            written = {file: StoredFile(*of) for report in reports for file, of in report.items()}
            with raised_together(OSError):
                if self._rank == 0:
                    folders.commit(name, written)
        finally:
            if self._is_first:
                shutil.rmtree(staged, ignore_errors=True)

    def close(self) -> None:
        """Stores the last records and removes the local folder; UserError where they cannot be stored."""
        if not self._upload:
            return
        try:
            self._upload.close()
        except OSError as error:
            raise UserError(
                f"{error.filename}: the last records are not stored ({error.strerror}). They are in {self._folder}."
            ) from None
        shutil.rmtree(self._folder, ignore_errors=True)


def run_store(config: JobConfig, saves: bool) -> RunStore:
    """Returns the store of `job.output`; `saves`: whether the run writes models."""
    return ObjectRun(config.output, saves) if isinstance(config.output, ObjectUrl) else LocalRun(config.output)


def _is_appended(name: str) -> bool:
    return is_record(name) and not name.startswith(_COMPLETE)


def _is_of_later_samples(name: str, done: int) -> bool:
    folder, _, rest = name.partition("/")
    number = rest.partition("/")[0]
    return folder == SAMPLES and number.isdecimal() and int(number) > done


def _content_of(file: Path) -> list[Content]:
    """Returns the content of a file, mapped into memory."""
    with file.open("rb") as opened:
        if not os.fstat(opened.fileno()).st_size:
            return []
        return [memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))]
