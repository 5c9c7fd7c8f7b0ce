"""Boxes of tensors in safetensors files, one file for each rank: written in one layout, read in any other.

    actor/exp_avg|model.layers.0.mlp.down_proj.weight|0:64,32:64

is the key of a stored box: namespace (role and kind of state), Hugging Face name of the tensor, box in the tensor. A
reader takes from the files of all ranks the parts of the boxes that it needs, and nothing else.
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

from verl_mg.checkpoint.safetensors_file import header
from verl_mg.errors import UserError
from verl_mg.sharding.boxes import Box, box_shape, full_box, intersect, numel, slices, translate_box

_RANGE = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True, eq=False)
class StoredBox:
    """A box of a tensor and the memory with its values."""

    namespace: str
    """Role and kind of state, such as `actor/exp_avg`."""
    tensor: str
    """Hugging Face name of the tensor."""
    box: Box
    """Box in the tensor."""
    values: Tensor
    """Values of the box, in its shape."""

    @property
    def key(self) -> str:
        """Key of the box in a file."""
        return f"{self.namespace}|{self.tensor}|{','.join(f'{start}:{stop}' for start, stop in self.box)}"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes a safetensors file; it is on disk when this returns.

    Args:
        path: file to write.
        tensors: contiguous tensors in host memory.

    Returns:
        The SHA-256 of the file in hexadecimal.
    """
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
    # Not through numpy: a storage that numpy has exported can never be resized again.
    size = values.nbytes
    return memoryview((ctypes.c_char * size).from_address(values.data_ptr())).cast("B") if size else b""


class ShardedReader:
    """Reader of the sharded safetensors files of all ranks; use it in a `with` block."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Opens the files and indexes their keys; raises UserError for a file that cannot be read."""
        self._files = {path: _open(path) for path in files}
        self._file_of = {key: path for path, file in self._files.items() for key in file.keys()}  # noqa: SIM118
        self._boxes: dict[tuple[str, str], dict[Box, str]] = defaultdict(dict)
        for key, path in self._file_of.items():
            if key.count("|") == 2:
                namespace, tensor, text = key.split("|")
                self._boxes[namespace, tensor][_parse_box(text, key, path)] = key

    def tensor(self, key: str) -> Tensor:
        """Reads a whole tensor by its key; raises UserError where the files do not contain it."""
        if key not in self._file_of:
            raise UserError(
                f"{self._folder}: {key!r} is missing. Resume from a checkpoint of this version and of this job."
            )
        return self._files[self._file_of[key]].get_tensor(key)

    def keys(self, prefix: str) -> list[str]:
        """Returns the keys that begin with `prefix`, sorted."""
        return sorted(key for key in self._file_of if key.startswith(prefix))

    def fill(self, part: StoredBox) -> None:
        """Reads a box into its memory, from all stored boxes that overlap it.

        Raises:
            UserError: the files do not contain the whole box, or are damaged.
        """
        missing = numel(part.box)
        for box, key in self._boxes.get((part.namespace, part.tensor), {}).items():
            common = intersect(box, part.box) if len(box) == len(part.box) else None
            if common is not None:
                dst = translate_box(common, part.box, _at_zero(part.box))
                src = translate_box(common, box, _at_zero(box))
                part.values[slices(dst)] = self._read(key, box, src)
                missing -= numel(common)
        if missing:
            raise UserError(
                f"{self._folder}: the box {part.box} of {part.tensor!r} in {part.namespace!r} is incomplete: the "
                "checkpoint has another model, or other trained weights. Resume with the configuration that wrote it."
            )

    def _read(self, key: str, stored: Box, box: Box) -> Tensor:
        path = self._file_of[key]
        try:
            values = self._files[path].get_slice(key)
            if (shape := tuple(values.get_shape())) != box_shape(stored):
                raise UserError(
                    f"{path}: {key!r} has shape {shape}; the checkpoint is damaged. Resume from an earlier one."
                )
            return values[slices(box)]
        except SafetensorError as error:
            raise UserError(f"{path}: {key!r} cannot be read ({error}). Resume from an earlier checkpoint.") from None

    @property
    def _folder(self) -> Path:
        return next(iter(self._files)).parent

    def __enter__(self) -> ShardedReader:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._files.clear()


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path}: not a readable safetensors file ({error}). Resume from an earlier checkpoint."
        ) from None


def _parse_box(text: str, key: str, path: Path) -> Box:
    ranges = [_RANGE.fullmatch(part) for part in text.split(",")]
    if not all(ranges):
        raise UserError(
            f"{path}: {key!r} has no box such as 0:64,32:64; the checkpoint is damaged. Resume from an earlier one."
        )
    return tuple((int(match[1]), int(match[2])) for match in ranges if match)


def _at_zero(box: Box) -> Box:
    return full_box(box_shape(box))
