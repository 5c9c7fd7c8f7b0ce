"""Reader and writer of boxes of the tensors in a Hugging Face directory.

- The reader reads only the requested slices of the safetensors files.
- The writer lays the files out in advance, so that many processes write their boxes at the same time and no process
  ever has a whole tensor.

    one process    `create`: files with headers, filled up to their size (sparse), index, untrained tensors
    barrier
    each process   `write` for each of its boxes: the contiguous runs of the box, at their offsets

    box rows 0:2, columns 2:4 of a tensor (3, 4): elements 2:4 and 6:8 of the tensor, two writes
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.checkpoint.quantized import block_of, dequantize, misfit, packed_box, packed_names, unpack
from verl_mg.checkpoint.safetensors_file import DTYPES, DamagedFileError, SafetensorsFile, header
from verl_mg.dtypes import torch_dtype
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import
from verl_mg.models.hf_config import INDEX, SINGLE
from verl_mg.models.tensor_tree import StackedTensor
from verl_mg.sharding.boxes import Box, Shard, box_shape, full_box, numel, slices

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


class UntrainedTensors:
    """Tensors that are copied from a directory; `shapes` and `dtypes` are by name."""

    def __init__(self, directory: ModelDirectory, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> None:
        self._directory, self._names_of_dtypes, self.shapes = directory, dtypes, shapes
        self.dtypes: dict[str, torch.dtype] = {name: torch_dtype(DTYPES[dtype]) for name, dtype in dtypes.items()}
        self._file: SafetensorsFile | None = None

    @classmethod
    def find(cls, folder: Path, prefixes: tuple[str, ...], owned: Collection[str]) -> UntrainedTensors:
        """Finds tensors with one of the prefixes, except for `owned` ones, in the headers of a directory's files."""
        directory = ModelDirectory.find(folder)
        names: dict[str, list[str]] = defaultdict(list)
        for name, file in directory.file_of.items():
            if name.startswith(prefixes) and name not in owned:
                names[file].append(name)
        # Headers only: an export by many ranks needs shapes and dtypes on each, and the bytes on one.
        shapes, dtypes = {}, {}
        for file in sorted(names):
            tensors = directory.open(file, repr(names[file][0])).tensors
            for name in names[file]:
                entry = tensors.get(name)
                if entry is None or entry.dtype not in DTYPES:
                    what = "is missing" if entry is None else f"is {entry.dtype}, which cannot be copied"
                    raise UserError(f"{folder / file}: tensor {name!r} {what}. Download the model again.")
                shapes[name], dtypes[name] = entry.shape, entry.dtype
        return cls(directory, shapes, dtypes)

    def packed(self) -> bytes:
        """Returns shapes and dtypes for other processes."""
        return json.dumps([self.shapes, self._names_of_dtypes]).encode()

    @classmethod
    def unpacked(cls, folder: Path, packed: bytes) -> UntrainedTensors:
        """Returns what another process has found; this object cannot copy, for it does not know the files."""
        shapes, dtypes = json.loads(packed)
        return cls(ModelDirectory(folder, {}), {name: tuple(shape) for name, shape in shapes.items()}, dtypes)

    def copy(self, tensor: str, target: Path, offset: int) -> None:
        """Copies a tensor in pieces into a file; tensors of one source should follow each other: one is open."""
        name = self._directory.file_of[tensor]
        if self._file is None or self._file.path.name != name:
            self._file = self._directory.open(name, repr(tensor))
        descriptor = os.open(target, os.O_WRONLY)
        try:
            for chunk in self._file.chunks(tensor):
                offset += os.pwrite(descriptor, chunk, offset)
        finally:
            os.close(descriptor)


class CheckpointReader:
    """Reader of boxes of tensors of a directory; of those it does not have, of `initial_values`."""

    def __init__(self, directory: ModelDirectory, initial_values: Mapping[str, Tensor] | None = None) -> None:
        self._directory = directory
        # A tensor of the directory has precedence: a value head that was trained before.
        self._initial = {
            name: values for name, values in (initial_values or {}).items() if name not in directory.file_of
        }
        self._files: dict[str, SafetensorsFile] = {}

    def read(self, tensor: str, box: Box) -> Tensor:
        """Reads one box of a tensor; an FP8 tensor is dequantized to float32, an MXFP4 tensor to bfloat16."""
        # Box by box while it is read: no rank has a whole dequantized tensor.
        if tensor in self._initial:
            return self._initial[tensor][slices(box)]
        if place := self._directory.stacked.get(tensor):
            return self._unpacked(place, box) if self._directory.is_packed(place) else self._unstacked(place, box)
        values = self._stored(tensor, box)
        return self._dequantized(tensor, box, values) if values.dtype is torch.float8_e4m3fn else values

    def _unstacked(self, place: StackedTensor, box: Box) -> Tensor:
        values = self._stored(place.name, place.box(box))[0]  # the dimension of experts, of length 1
        return values.permute(*reversed(range(values.dim()))) if place.transposed else values

    def _unpacked(self, place: StackedTensor, box: Box) -> Tensor:
        names, needed = packed_names(place.name), packed_box(place, box)
        blocks, scales = (self._stored(name, needed) for name in names)
        try:
            return unpack(blocks, scales, box)
        except ValueError as error:
            raise self._directory.unfit_scales(names[1], names[0], f"{error} in the box {needed}") from None

    def _dequantized(self, tensor: str, box: Box, values: Tensor) -> Tensor:
        name = self._directory.scale_of(tensor)
        scales, declared = self._stored(name, ()), self._directory.block
        shape = self._files[self._directory.file_of[tensor]].tensors[tensor].shape
        block = block_of(shape, tuple(scales.shape), declared)
        if not block:
            raise self._directory.unfit_scales(name, tensor, misfit(shape, tuple(scales.shape), declared))
        try:
            return dequantize(values, scales, box, block)
        except ValueError as error:
            raise self._directory.unfit_scales(name, tensor, f"{error} in the box {box}") from None

    def _stored(self, tensor: str, box: Box) -> Tensor:
        """Returns a box as it is in the file; the empty box is the whole tensor."""
        name = self._directory.file_with(tensor, box)
        if name not in self._files:
            self._files[name] = self._directory.open(name, f"the box {box} of {tensor!r}")
        try:
            return self._files[name].read(tensor, box)
        except KeyError:
            raise self._directory.missing_in_file(tensor, box) from None
        except (DamagedFileError, IndexError) as error:
            raise UserError(
                f"{self._directory.folder / name}: the box {box} of {tensor!r} cannot be read ({error}). "
                "Download the model again."
            ) from None


def load_shards(reader: CheckpointReader, shards: Mapping[str, Shard], parameters: Mapping[str, Tensor]) -> None:
    """Fills pieces of the parameters of one rank in place, reading only these boxes; padding becomes 0."""
    for name, shard in shards.items():
        parameter = parameters[name].detach()
        if tuple(parameter.shape) != shard.shape:
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}, but {shard.shape} in the weight table")
        for piece in shard.pieces:
            target = parameter[slices(piece.target)]
            target.copy_(reader.read(piece.tensor, piece.source).view(target.shape))
        for box in shard.padding:
            parameter[slices(box)] = 0


class CheckpointWriter:
    """Writer of a model directory by many processes; `copies` repeat other tensors, some have their own of `dtypes`."""

    def __init__(
        self,
        folder: str | Path,
        shapes: Mapping[str, Shard],
        dtype: torch.dtype,
        file_bytes: int = 5 * 10**9,
        copies: Mapping[str, str] | None = None,
        stacked: Mapping[str, StackedTensor] | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        untrained: UntrainedTensors | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._copies, self._stacked = dict(copies or {}), stacked or {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for tensor, shard in shapes.items():
            place = self._stacked.get(tensor)
            self._shapes[place.name if place else tensor] = place.shape if place else shard.shape
        self._shapes |= {name: self._shapes[original] for name, original in self._copies.items()}
        self._dtypes = dict.fromkeys(self._shapes, dtype) | dict(dtypes or {})
        groups = split_by_size(self._shapes, dtype.itemsize, file_bytes)
        # Separate files, whose bytes one process copies before the others write.
        if untrained and untrained.shapes:
            self._shapes |= untrained.shapes
            self._dtypes |= untrained.dtypes
            groups.append(list(untrained.shapes))
        self._untrained, many = untrained, len(groups) > 1
        self._headers: dict[str, bytes] = {}
        self._offsets: dict[str, tuple[str, int]] = {}
        for number, group in enumerate(groups, 1):
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if many else SINGLE
            # The widest first: readers view the bytes in place, so a tensor begins at a multiple of its item size.
            group.sort(key=lambda tensor: -self._dtypes[tensor].itemsize)
            self._headers[name], offsets = header({t: (self._dtypes[t], self._shapes[t]) for t in group})
            self._offsets |= {tensor: (name, offset) for tensor, offset in offsets.items()}

    def create(self) -> None:
        """Creates the files and copies untrained tensors; called by one process, before any process writes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, head in self._headers.items():
            last = max(offset + self._bytes(tensor) for tensor, (file, offset) in self._offsets.items() if file == name)
            with open(self.folder / name, "wb") as file:
                file.write(head)
                file.truncate(last)  # processes then write at any offset, in any order
        if len(self._headers) > 1:
            weight_map = {tensor: file for tensor, (file, _) in self._offsets.items()}
            total = sum(self._bytes(tensor) for tensor in self._shapes)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        for tensor in self._untrained.shapes if self._untrained else ():
            assert self._untrained
            name, offset = self._offsets[tensor]
            self._untrained.copy(tensor, self.folder / name, offset)

    def write(self, tensor: str, box: Box, values: Tensor) -> None:
        """Writes one box of a tensor, from any device and dtype; boxes of different processes must not overlap."""
        for copy, original in self._copies.items():
            if original == tensor:
                self.write(copy, box, values)
        if place := self._stacked.get(tensor):
            if place.transposed:
                values = values.reshape(box_shape(box)).permute(*reversed(range(len(box))))
            tensor, box = place.name, place.box(box)
        name, offset = self._offsets[tensor]
        shape = self._shapes[tensor]
        data = values.detach().to(self._dtypes[tensor]).contiguous().cpu().reshape(box_shape(box))
        descriptor = os.open(self.folder / name, os.O_WRONLY)
        try:
            for start, run in _contiguous_runs(shape, box, data):
                # Not through numpy: a storage that numpy has exported can never be resized again.
                content = ctypes.string_at(run.data_ptr(), run.nbytes)
                os.pwrite(descriptor, content, offset + start * data.itemsize)
        finally:
            os.close(descriptor)

    def _bytes(self, tensor: str) -> int:
        return math.prod(self._shapes[tensor]) * self._dtypes[tensor].itemsize


def _contiguous_runs(shape: tuple[int, ...], box: Box, data: Tensor) -> list[tuple[int, Tensor]]:
    """Returns (element offset in the tensor, flat values) of each run of the box that is contiguous in the tensor."""
    if box[1:] == full_box(shape[1:]):  # also a vector, and a scalar, whose box has no dimension
        return [(box[0][0] * math.prod(shape[1:]) if box else 0, data.reshape(-1))]
    inner = math.prod(shape[1:])
    return [
        (row * inner + start, run)
        for row, part in zip(range(*box[0]), data, strict=True)
        for start, run in _contiguous_runs(shape[1:], box[1:], part)
    ]


def split_by_size(shapes: Mapping[str, tuple[int, ...]], itemsize: int, limit: int) -> list[list[str]]:
    """Distributes tensors over files of at most `limit` bytes, in order; a single tensor may be larger."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        nbytes = numel(full_box(shape)) * itemsize
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    return groups
