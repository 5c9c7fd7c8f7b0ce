"""Boxes of tensors in safetensors files, a file a rank: what is written under one layout is read under any other.

    actor/exp_avg|model.layers.0.mlp.down_proj.weight|0:64,32:64

is the key of a part: the plane (whose, and what of it), the tensor by its Hugging Face name, the box in it. A reader
takes from the files of all ranks what stands in the boxes that it asks for, and nothing else.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl_mg.checkpoint.safetensors_header import header
from verl_mg.errors import UserError
from verl_mg.sharding.boxes import Box, box_shape, full_box, intersect, numel, slices, translate_box

_RANGE = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True, eq=False)
class StoredBox:
    """A box of a tensor and the memory that it stands in: `values` has the box's shape."""

    namespace: str
    tensor: str
    box: Box
    values: Tensor

    @property
    def key(self) -> str:
        """Its name in a file."""
        return f"{self.namespace}|{self.tensor}|{','.join(f'{start}:{stop}' for start, stop in self.box)}"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file of contiguous tensors on the host, on disk when this returns; its SHA-256, in hex."""
    head, _ = header({name: (values.dtype, tuple(values.shape)) for name, values in tensors.items()})
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in (head, *map(_memory, tensors.values())):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _memory(values: Tensor) -> memoryview | bytes:
    # Not through numpy: a storage that it has seen can never be resized again.
    size = values.nbytes
    return memoryview((ctypes.c_char * size).from_address(values.data_ptr())).cast("B") if size else b""


class StoredParts:
    """The tensors of some files, by key; use it in a `with` block. UserError for a file that cannot be read."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = {path: _open(path) for path in files}
        self._home = {key: path for path, file in self._files.items() for key in file.keys()}  # noqa: SIM118
        self._boxes: dict[tuple[str, str], dict[Box, str]] = defaultdict(dict)
        for key, path in self._home.items():
            if key.count("|") == 2:
                namespace, tensor, text = key.split("|")
                self._boxes[namespace, tensor][_parsed(text, key, path)] = key

    @property
    def planes(self) -> set[str]:
        """The planes of which there is anything."""
        return {namespace for namespace, _ in self._boxes}

    def tensor(self, key: str) -> Tensor:
        """A whole tensor by its key; UserError where there is none."""
        if key not in self._home:
            raise UserError(f"{self._folder}: holds no {key!r}; it was written by another version or for another job")
        return self._files[self._home[key]].get_tensor(key)

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin so, sorted."""
        return sorted(key for key in self._home if key.startswith(prefix))

    def fill(self, part: StoredBox) -> None:
        """Read a part into its memory; UserError where the files lack any of it."""
        missing = numel(part.box)
        for box, key in self._boxes.get((part.namespace, part.tensor), {}).items():
            common = intersect(box, part.box) if len(box) == len(part.box) else None
            if common is not None:
                here, there = (
                    translate_box(common, part.box, _at_zero(part.box)),
                    translate_box(common, box, _at_zero(box)),
                )
                part.values[slices(here)] = self._read(key, box, there)
                missing -= numel(common)
        if missing:
            raise UserError(
                f"{self._folder}: the box {part.box} of {part.tensor!r} is not all there in {part.namespace!r}; "
                "it is of another model, or of other trained weights"
            )

    def _read(self, key: str, whole: Box, box: Box) -> Tensor:
        path = self._home[key]
        try:
            found = self._files[path].get_slice(key)
            if (shape := tuple(found.get_shape())) != box_shape(whole):
                raise UserError(f"{path}: {key!r} is of the shape {shape}; the checkpoint is damaged")
            return found[slices(box)]
        except SafetensorError as error:
            raise UserError(f"{path}: {key!r} cannot be read ({error})") from None

    @property
    def _folder(self) -> Path:
        return next(iter(self._files)).parent

    def __enter__(self) -> StoredParts:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._files.clear()


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from None


def _parsed(text: str, key: str, path: Path) -> Box:
    ranges = [_RANGE.fullmatch(part) for part in text.split(",")]
    if not all(ranges):
        raise UserError(f"{path}: {key!r} names no box such as 0:64,32:64")
    return tuple((int(found[1]), int(found[2])) for found in ranges if found)


def _at_zero(box: Box) -> Box:
    return full_box(box_shape(box))
