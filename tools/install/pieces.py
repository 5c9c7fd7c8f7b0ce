"""Packs a folder into pieces of one size for a machine without a network, and unpacks them there in parallel.

The pieces are archives (`.tar.xz`), one after the other, cut at every N megabytes; `manifest.json` has the pieces'
sizes and checksums, and the archives' sizes. Holes of files are neither stored nor filled.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from verl_mg.errors import UserError

MANIFEST = "manifest.json"
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9}]
BLOCK, HOLE = 1 << 20, 1 << 14
ARCHIVE_BYTES = 64 << 20
"""Size of the files in an archive; a larger file is a whole archive. The dictionary of the compression is as large."""


@dataclass(frozen=True)
class Piece:
    """One file that travels, with its checksum."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Contents of a folder of pieces."""

    pieces: tuple[Piece, ...]
    archives: tuple[int, ...]
    """Sizes of the archives, in their order in the pieces."""

    @classmethod
    def of(cls, folder: Path) -> Manifest:
        """The manifest of a folder whose pieces are all there and whole."""
        try:
            content = json.loads((folder / MANIFEST).read_text())
            manifest = cls(tuple(Piece(**piece) for piece in content["pieces"]), tuple(content["archives"]))
        except (OSError, ValueError, KeyError, TypeError) as error:  # it may be damaged like a piece
            raise UserError(f"{folder / MANIFEST}: cannot be read. Copy it into the folder of the pieces.") from error
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda piece: _check(folder / piece.name, piece), manifest.pieces))
        return manifest


def pack(tree: Path, folder: Path, piece_bytes: int) -> Manifest:
    """Writes the pieces of all files in `tree` into an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as scratch, ThreadPoolExecutor(os.cpu_count()) as threads:
        groups = list(_groups(tree))
        archives = [Path(scratch, str(number)) for number in range(len(groups))]
        list(threads.map(lambda group, archive: _archive(tree, group, archive), groups, archives))
        pieces = tuple(_cut(archives, folder, piece_bytes))
        manifest = Manifest(pieces, tuple(archive.stat().st_size for archive in archives))
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")
    return manifest


def write_with_holes(file: Path, content: bytes) -> None:
    """Writes a file whose blocks of zeros are holes, which pieces do not have."""
    zeros = bytes(HOLE)
    with file.open("wb") as out:
        for start in range(0, len(content), HOLE):
            if (block := content[start : start + HOLE]) != zeros:
                out.seek(start)
                out.write(block)
        out.truncate(len(content))


def unpack(folder: Path, target: Path) -> None:
    """Unpacks the pieces of `folder` into a new folder; nothing is written unless all are there and whole."""
    manifest = Manifest.of(folder)
    target.mkdir(parents=True)
    starts = [sum(manifest.archives[:number]) for number in range(len(manifest.archives))]
    # The largest first, so that no process is left with one of them at the end.
    order = sorted(zip(manifest.archives, starts, strict=True), reverse=True)
    with ProcessPoolExecutor() as processes:
        running = [processes.submit(_extract, folder, manifest.pieces, start, size, target) for size, start in order]
        for each in running:
            each.result()


def _groups(tree: Path) -> Iterator[list[str]]:
    """Paths in the order of names, cut into groups for archives; the largest files come first."""
    sizes = {str(path.relative_to(tree)): path.lstat().st_size for path in tree.rglob("*")}
    large = [path for path, size in sizes.items() if size > ARCHIVE_BYTES]
    yield from ([path] for path in sorted(large, key=sizes.__getitem__, reverse=True))
    group: list[str] = []
    filled = 0
    for path in sorted(sizes.keys() - set(large)):
        group.append(path)
        filled += sizes[path]
        if filled > ARCHIVE_BYTES:
            yield group
            group, filled = [], 0
    if group:
        yield group


def _archive(tree: Path, paths: Sequence[str], archive: Path) -> None:
    reproducible = ["--mtime=@0", "--owner=0", "--group=0", "--numeric-owner", "--format=gnu"]
    command = ["tar", "--create", "--sparse", "--hard-dereference", *reproducible, "--no-recursion"]
    with TemporaryDirectory() as scratch, lzma.open(archive, "wb", filters=FILTERS) as compressed:
        listed = Path(scratch, "names")
        listed.write_text("\0".join(paths))
        command += ["--directory", str(tree), "--null", f"--files-from={listed}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as tar:
            assert tar.stdout
            while block := tar.stdout.read(BLOCK):
                compressed.write(block)
    if tar.returncode:
        raise UserError(f"{tree}: tar ended with exit code {tar.returncode}. GNU tar is needed; see its message above.")


def _cut(archives: Sequence[Path], folder: Path, piece_bytes: int) -> Iterator[Piece]:
    """Pieces of all archives one after the other; a piece may end within an archive."""
    content = _blocks(archives)
    rest = next(content, b"")
    number = 0
    while rest:
        piece = folder / f"piece-{number:03d}"
        checksum, free = hashlib.sha256(), piece_bytes
        with piece.open("wb") as file:
            while rest and free:
                file.write(rest[:free])
                checksum.update(rest[:free])
                rest, free = rest[free:] or next(content, b""), free - len(rest[:free])
        yield Piece(piece.name, piece_bytes - free, checksum.hexdigest())
        number += 1


def _blocks(archives: Sequence[Path]) -> Iterator[bytes]:
    for archive in archives:
        with archive.open("rb") as file:
            while block := file.read(BLOCK):
                yield block


def _check(file: Path, piece: Piece) -> None:
    if not file.is_file():
        raise UserError(f"{file}: this piece is missing. Copy it into the folder of {MANIFEST}.")
    with file.open("rb") as content:
        checksum = hashlib.file_digest(content, "sha256").hexdigest()
    if checksum != piece.sha256:
        raise UserError(f"{file}: its content is not that of {MANIFEST}. Copy this piece again.")


def _extract(folder: Path, pieces: Sequence[Piece], start: int, size: int, target: Path) -> None:
    with (
        io.BufferedReader(_Archive(folder, pieces, start, size), BLOCK) as compressed,
        lzma.open(compressed) as content,
        # As a stream: what is read once is never sought again.
        tarfile.open(fileobj=content, mode="r|", bufsize=BLOCK) as archive,
    ):
        archive.extractall(target, filter="data")


class _Archive(io.RawIOBase):
    """The bytes of one archive, from one or several pieces."""

    def __init__(self, folder: Path, pieces: Sequence[Piece], start: int, size: int) -> None:
        self._ranges = []
        for piece in pieces:
            begin, end = max(start, 0), min(start + size, piece.size)
            if begin < end:
                self._ranges.append((folder / piece.name, begin, end))
            start -= piece.size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._ranges:
            return 0
        file, begin, end = self._ranges.pop(0)
        with file.open("rb") as piece:
            piece.seek(begin)
            count = piece.readinto(memoryview(buffer)[: end - begin])
        if begin + count < end:
            self._ranges.insert(0, (file, begin + count, end))
        return count
