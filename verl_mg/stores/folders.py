"""Folders of files that are complete or absent, such as checkpoints, in one place.

each rank    write         its files, with their SHA-256
all ranks    the caller gathers sums and sizes: every file is written then
one rank     commit        the sums of all files; from then on the folder is complete

file system     000020.partial/rank-00000.safetensors, ..., SHA256SUMS ─▶ renamed to 000020
object store    000020/rank-00000.safetensors, ..., SHA256SUMS, manifest.json ─▶ complete with the last one
"""

from __future__ import annotations

import hashlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from verl_mg.errors import UserError

Content = bytes | memoryview

SUMS = "SHA256SUMS"  # file with the sums of all others, in the format of `sha256sum`
PARTIAL = ".partial"  # ending of the name of a folder that is being written


class StoredFile(NamedTuple):
    """A file that is on disk or in the store."""

    sha256: str
    size: int


class UnreadableError(UserError):
    """A folder that cannot be read now, and may be intact."""


class StoredFolder(ABC):
    """A complete folder; its text is its place, for messages. UnreadableError where its store does not answer."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def file(self, name: str) -> Path:
        """Returns the local path of a file; OSError where it is missing or damaged in the store."""

    @abstractmethod
    def problem_of(self, name: str, sha256: str) -> str:
        """Reads a whole file; returns what is wrong with it, or "" where it has this sum."""

    @abstractmethod
    def forget(self) -> None:
        """Removes what was copied to the local disk to be read."""


class Folders(ABC):
    """The folders in one place; its text is the place, for messages."""

    @abstractmethod
    def complete(self) -> list[str]:
        """Returns the names of the complete folders."""

    @abstractmethod
    def open(self, name: str) -> StoredFolder:
        """Returns a complete folder."""

    @abstractmethod
    def write(self, folder: str, name: str, content: Iterable[Content]) -> StoredFile:
        """Writes a file of a folder that is not complete yet, durably; any rank."""

    @abstractmethod
    def commit(self, folder: str, files: Mapping[str, StoredFile]) -> None:
        """Completes a folder that has exactly these files, in place of one of the same name; one rank, last."""

    @abstractmethod
    def remove(self, folder: str) -> None:
        """Removes a folder, complete or not; a crash in between leaves one that is not complete."""

    @abstractmethod
    def remove_unfinished(self) -> None:
        """Removes what a crash has left of folders that are not complete."""


def sums_of(files: Mapping[str, StoredFile]) -> bytes:
    """Returns the content of SUMS."""
    return "".join(f"{file.sha256}  {name}\n" for name, file in sorted(files.items())).encode()


class LocalFolder(StoredFolder):
    """A folder on the file system."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.name)
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def file(self, name: str) -> Path:
        """Returns the path of a file, which may be missing."""
        return self._path / name

    def problem_of(self, name: str, sha256: str) -> str:
        """Returns why a file cannot be read or has another sum, or ""."""
        path = self._path / name
        try:
            with path.open("rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return f"{path}: cannot be read ({error.strerror})"
        return "" if actual == sha256 else f"{path}: damaged, its SHA-256 is not that of {SUMS}"

    def forget(self) -> None:
        """Does nothing: the files are read where they are."""


class LocalFolders(Folders):
    """Folders on the file system, renamed when they are complete."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def complete(self) -> list[str]:
        """Returns the names of all folders without the ending of unfinished ones."""
        return [path.name for path in self._path.glob("*") if not path.name.endswith(PARTIAL)]

    def open(self, name: str) -> LocalFolder:
        """Returns the folder of this name."""
        return LocalFolder(self._path / name)

    def write(self, folder: str, name: str, content: Iterable[Content]) -> StoredFile:
        """Writes a file, which is on disk when this returns."""
        partial = self._path / (folder + PARTIAL)
        partial.mkdir(parents=True, exist_ok=True)
        digest, size = hashlib.sha256(), 0
        with (partial / name).open("wb") as file:
            for block in content:
                digest.update(block)
                size += file.write(block)
            # The rename of the folder may otherwise reach the disk before the content.
            file.flush()
            os.fsync(file.fileno())
        return StoredFile(digest.hexdigest(), size)

    def commit(self, folder: str, files: Mapping[str, StoredFile]) -> None:
        """Writes the sums and renames the folder."""
        self.write(folder, SUMS, [sums_of(files)])
        path = self._path / folder
        if path.exists():
            shutil.rmtree(path)
        os.replace(path.with_name(folder + PARTIAL), path)
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # makes the rename durable
        finally:
            os.close(descriptor)

    def remove(self, folder: str) -> None:
        """Removes a folder under both names."""
        for name in (folder, folder + PARTIAL):
            shutil.rmtree(self._path / name, ignore_errors=True)

    def remove_unfinished(self) -> None:
        """Removes all folders with the ending of unfinished ones."""
        for unfinished in self._path.glob(f"*{PARTIAL}"):
            shutil.rmtree(unfinished, ignore_errors=True)
