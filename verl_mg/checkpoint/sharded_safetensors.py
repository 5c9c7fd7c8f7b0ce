"""Boxes of tensors in safetensors files, one file for each rank: written in one layout, read in any other.

    actor/exp_avg|model.layers.0.mlp.down_proj.weight|0:64,32:64

is the key of a stored box: namespace (role and kind of state), Hugging Face name of the tensor, box in the tensor. A
reader takes from the files the parts of the boxes that it needs, and nothing else: only from its rank's file under the
layout in which the files were written, and under another one from the files that the index names:

    zcat index.gz          `rank 0`, the keys of the boxes in rank-00000.safetensors, `rank 1`, ...

A rank's file also has its share of replicated tensors, which other ranks write too: so it is the only one that the rank
opens in a resume under the same layout.
"""

from __future__ import annotations

import ctypes
import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from verl_mg.checkpoint.safetensors_file import DamagedFileError, SafetensorsFile, header
from verl_mg.errors import UserError
from verl_mg.sharding.boxes import Box, box_shape, full_box, intersect, slices, subtract, translate_box
from verl_mg.stores.folders import Content, StoredFolder

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "index.gz"  # file that lists the keys of the boxes of all ranks
_RANGE = re.compile(r"(\d+):(\d+)")
_SEPARATORS = 2  # of "|" in the key of a box; keys of other tensors of a file have another number
_RANK = "rank "


@dataclass(frozen=True, eq=False)
class StoredBox:
    """A box of a tensor and the memory with its values."""

    namespace: str  # role and kind of state, such as `actor/exp_avg`
    tensor: str  # Hugging Face name of the tensor
    box: Box  # box in the tensor
    values: Tensor  # values of the box, in its shape

    @property
    def key(self) -> str:
        """Key of the box in a file."""
        return f"{self.namespace}|{self.tensor}|{','.join(f'{start}:{stop}' for start, stop in self.box)}"


def tensor_blocks(tensors: Mapping[str, Tensor]) -> list[Content]:
    """Returns the content of a safetensors file of contiguous tensors in host memory, without copies of them."""
    head, _ = header({name: (values.dtype, tuple(values.shape)) for name, values in tensors.items()})
    return [head, *map(_memory, tensors.values())]


def _memory(values: Tensor) -> Content:
    # Not through numpy: a storage that numpy has exported can never be resized again.
    size = values.nbytes
    return memoryview((ctypes.c_char * size).from_address(values.data_ptr())).cast("B") if size else b""


def index_entry(rank: int, keys: Iterable[str]) -> bytes:
    """Returns the part of the index that lists the boxes of one rank; the index is all parts, one after another."""
    # Each rank compresses its part: gzip members that follow each other are one file. Without a time, so that equal
    # checkpoints have equal sums.
    lines = [f"{_RANK}{rank}", *(key for key in keys if key.count("|") == _SEPARATORS)]
    return gzip.compress("\n".join([*lines, ""]).encode(), compresslevel=1, mtime=0)


def rank_file(rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def local_file(folder: StoredFolder, name: str) -> Path:
    """Returns the path of a file of a checkpoint; UserError where it cannot be had."""
    try:
        return folder.file(name)
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}. Resume from an earlier checkpoint.") from None


class RankFile:
    """The file of one rank, opened once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = SafetensorsFile(path)
        except (OSError, DamagedFileError) as error:
            raise UserError(
                f"{path}: not a readable safetensors file ({error}). Resume from an earlier checkpoint."
            ) from None
        self._keys: dict[str, list[str]] = defaultdict(list)
        for key in self._file.tensors:
            if key.count("|") == _SEPARATORS:
                self._keys[key.rpartition("|")[0]].append(key)

    def tensor(self, key: str) -> Tensor:
        """Returns a copy of a whole tensor; raises UserError where the file does not contain it."""
        return self._values(key, None).clone()

    def keys(self, prefix: str) -> list[str]:
        """Returns the keys that begin with `prefix`, sorted."""
        return sorted(key for key in self._file.tensors if key.startswith(prefix))

    def keys_of(self, name: str) -> list[str]:
        """Returns the keys of the boxes of a tensor; `name` is `NAMESPACE|TENSOR`."""
        return self._keys.get(name, [])

    def read(self, key: str, box: Box) -> Tensor:
        """Returns a part of a stored box, as a view of the file."""
        stored = _parse_box(key, str(self.path))
        values = self._values(key, stored)
        return values[slices(translate_box(box, stored, full_box(box_shape(stored))))]

    def _values(self, key: str, stored: Box | None) -> Tensor:
        try:
            values = self._file.read(key)
        except KeyError:
            raise UserError(
                f"{self.path}: {key!r} is missing. Resume from a checkpoint of this version and of this job."
            ) from None
        except DamagedFileError as error:
            raise UserError(
                f"{self.path}: {key!r} cannot be read ({error}). Resume from an earlier checkpoint."
            ) from None
        if stored is not None and tuple(values.shape) != box_shape(stored):
            raise UserError(
                f"{self.path}: {key!r} has shape {tuple(values.shape)}; the checkpoint is damaged. "
                "Resume from an earlier one."
            )
        return values


class ShardedReader:
    """Reader of boxes from the file of `rank`; what that does not have, by the index from the others."""

    def __init__(self, folder: StoredFolder, rank: int | None) -> None:
        self._folder, self._rank = folder, rank
        self._files: dict[int, RankFile] = {}

    def file(self, rank: int) -> RankFile:
        """Returns the file of a rank; raises UserError where it cannot be read."""
        if rank not in self._files:
            self._files[rank] = RankFile(local_file(self._folder, rank_file(rank)))
        return self._files[rank]

    def fill(self, part: StoredBox) -> None:
        """Reads a box into its memory, from stored boxes that overlap it; UserError where they do not cover it."""
        missing = [part.box]
        for rank, key in self._stored(f"{part.namespace}|{part.tensor}"):
            box = _parse_box(key, str(self._folder))
            if len(box) == len(part.box):
                missing = [rest for hole in missing for rest in self._copy(part, hole, rank, key, box)]
            if not missing:
                return
        raise UserError(
            f"{self._folder}: the box {part.box} of {part.tensor!r} in {part.namespace!r} is incomplete: the "
            "checkpoint has another model or optimizer, or other trained weights. Resume with the configuration that "
            "wrote it."
        )

    def _copy(self, part: StoredBox, hole: Box, rank: int, key: str, box: Box) -> list[Box]:
        """Copies what a stored box has of a hole in a part; returns the rest of the hole."""
        common = intersect(box, hole)
        if common is None:
            return [hole]
        target = translate_box(common, part.box, full_box(box_shape(part.box)))
        part.values[slices(target)] = self.file(rank).read(key, common)
        return subtract(hole, common)

    def _stored(self, name: str) -> Iterator[tuple[int, str]]:
        """Yields (rank, key) of the stored boxes of a tensor: first this rank's, then from files that are open."""
        if self._rank is not None:
            yield from ((self._rank, key) for key in self.file(self._rank).keys_of(name))
        # Readers begin at different replicas, so that not all of them open the file of the first one.
        first = self._rank or 0
        others = (entry for entry in self._index.get(name, ()) if entry[0] != self._rank)
        yield from sorted(others, key=lambda entry: (entry[0] not in self._files, entry[0] < first, entry[0]))

    @cached_property
    def _index(self) -> dict[str, list[tuple[int, str]]]:
        """(rank, key) of all stored boxes, by `NAMESPACE|TENSOR`."""
        path = local_file(self._folder, INDEX)
        try:
            lines = gzip.decompress(path.read_bytes()).decode().splitlines()
            boxes: dict[str, list[tuple[int, str]]] = defaultdict(list)
            rank = 0
            for line in lines:
                if line.startswith(_RANK):
                    rank = int(line.removeprefix(_RANK))
                else:
                    boxes[line.rpartition("|")[0]].append((rank, line))
        except (OSError, EOFError, zlib.error, ValueError) as error:
            raise UserError(f"{path}: not an index ({error}). Resume from an earlier checkpoint.") from None
        return boxes


def _parse_box(key: str, place: str) -> Box:
    text = key.rpartition("|")[2]
    ranges = [_RANGE.fullmatch(part) for part in text.split(",")] if text else []  # the box of a scalar has no text
    if not all(ranges):
        raise UserError(
            f"{place}: {key!r} has no box such as 0:64,32:64; the checkpoint is damaged. Resume from an earlier one."
        )
    return tuple((int(match[1]), int(match[2])) for match in ranges if match)
