"""Folders on an object store: complete with their manifest, which is put last.

    manifest.json    {"rank-00000.safetensors": ["5e88...", 4096], "SHA256SUMS": [...], ...}: SHA-256 and bytes of each

A file is read by fetching it to the local disk. Listed sizes are compared with the manifest before, and the sum of what
has arrived after, so an object that was cut short, exchanged or damaged is never read as what it was.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from verl_mg.jsonl import replacing
from verl_mg.stores.bucket import Bucket, StoreError, UnansweredError
from verl_mg.stores.folders import SUMS, Content, Folders, StoredFile, StoredFolder, UnreadableError, sums_of

MANIFEST = "manifest.json"


class ObjectFolder(StoredFolder):
    """A folder of a store, whose files are fetched into a local folder."""

    def __init__(self, bucket: Bucket, name: str, local: Path) -> None:
        super().__init__(name)
        self._bucket, self._local = bucket, local

    def __str__(self) -> str:
        return f"{self._bucket.url}/{self.name}"

    def file(self, name: str) -> Path:
        """Fetches a file unless it was fetched before; `StoreError` where it is not what the manifest says."""
        path = self._local / name
        if path.exists():  # it gets its name when it is complete and checked
            return path
        if name not in self._manifest:
            raise self._error(name, f"{MANIFEST} does not name it")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, _answered():
            try:
                fetched = self._bucket.fetch(f"{self.name}/{name}", partial, self._manifest[name].size)
            except FileNotFoundError:
                raise self._error(name, f"missing, although {MANIFEST} names it") from None
            if fetched != self._manifest[name]:
                raise self._error(name, f"damaged, its SHA-256 is not that of {MANIFEST}")
        return path

    def problem_of(self, name: str, sha256: str) -> str:
        """Fetches a file; returns what is wrong with it, or ""."""
        try:
            self.file(name)
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return "" if self._manifest[name].sha256 == sha256 else f"{self}/{name}: {SUMS} and {MANIFEST} differ"

    def forget(self) -> None:
        """Removes the local copies."""
        shutil.rmtree(self._local, ignore_errors=True)

    @cached_property
    def _manifest(self) -> Mapping[str, StoredFile]:
        with _answered():
            try:
                content: dict[str, Any] = json.loads(self._bucket.read(f"{self.name}/{MANIFEST}"))
                manifest = {name: StoredFile(str(sha256), int(size)) for name, (sha256, size) in content.items()}
            except (ValueError, TypeError, AttributeError, OverflowError, FileNotFoundError) as error:
                raise self._error(MANIFEST, f"not a manifest ({error})") from None
            _check_sizes(self._bucket, self.name, manifest)
        return manifest

    def _error(self, name: str, reason: str) -> StoreError:
        return StoreError(f"{self}/{name}", reason)


@contextmanager
def _answered() -> Iterator[None]:
    """Raises an UnreadableError where the store does not answer: otherwise objects would count as damaged."""
    try:
        yield
    except UnansweredError as error:
        raise UnreadableError(f"{error}. Start again when the store can be read.") from None


def _check_sizes(bucket: Bucket, folder: str, files: Mapping[str, StoredFile]) -> set[str]:
    """Raises `StoreError` where an object is missing or has another size; returns the names of further objects."""
    sizes = {name.removeprefix(f"{folder}/"): size for name, size in bucket.sizes(folder).items()}
    for name, file in files.items():
        if sizes.get(name) != file.size:
            problem = f"has {sizes[name]} bytes" if name in sizes else "is missing"
            raise StoreError(f"{bucket.url}/{folder}/{name}", f"{problem}, of the {file.size} bytes that were written")
    return sizes.keys() - files.keys()


class ObjectFolders(Folders):
    """Folders below a URL; those that are read are copied into a local folder."""

    def __init__(self, bucket: Bucket, local: Path) -> None:
        self._bucket, self._local = bucket, local

    def __str__(self) -> str:
        return str(self._bucket.url)

    def complete(self) -> list[str]:
        """Returns the names of the folders with a manifest."""
        end = f"/{MANIFEST}"
        return [name.removesuffix(end) for name in self._bucket.sizes() if name.endswith(end)]

    def open(self, name: str) -> ObjectFolder:
        """Returns a folder, whose manifest is read with its first file."""
        return ObjectFolder(self._bucket, name, self._local / name)

    def write(self, folder: str, name: str, content: Iterable[Content]) -> StoredFile:
        """Writes an object, in parts at the same time."""
        return self._bucket.put(f"{folder}/{name}", content)

    def commit(self, folder: str, files: Mapping[str, StoredFile]) -> None:
        """Writes the sums, checks that all objects are there, and writes the manifest."""
        # The sums are for those who copy the folder to a disk: it then is a folder as on a disk.
        named = {**files, SUMS: self.write(folder, SUMS, [sums_of(files)])}
        others = _check_sizes(self._bucket, folder, named) - {MANIFEST}
        self._bucket.remove(f"{folder}/{name}" for name in sorted(others))
        self.open(folder).forget()  # what was read of one of the same name
        self.write(folder, MANIFEST, [json.dumps(named, indent=1).encode()])

    def remove(self, folder: str) -> None:
        """Removes the manifest, and then the rest."""
        self._bucket.remove([f"{folder}/{MANIFEST}"])
        self._bucket.remove(self._bucket.sizes(folder))

    def remove_unfinished(self) -> None:
        """Removes objects of folders without a manifest."""
        complete = tuple(f"{name}/" for name in self.complete())
        self._bucket.remove(name for name in self._bucket.sizes() if not name.startswith(complete))
