"""Reading and writing boxes of the tensors in a Hugging Face directory.

A reader takes only the slices that it is asked for out of the safetensors files. A writer lays the files
out in advance, so that many processes write their own boxes at once and no tensor is ever put together.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl_mg.checkpoint.safetensors_header import DTYPE_NAMES, header
from verl_mg.errors import UserError
from verl_mg.sharding.boxes import Box, Shard, box_shape, full_box, numel, slices

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = tuple(DTYPE_NAMES[dtype] for dtype in (torch.float32, torch.bfloat16, torch.float16))


class CheckpointReader:
    """The tensors of a model directory; use it in a `with` block.

    fresh: values of tensors that the directory need not have.
    """

    def __init__(self, model_dir: str | Path, fresh: Mapping[str, Tensor] | None = None) -> None:
        self.folder = Path(model_dir)
        self._files = self._find_files()
        self._open: dict[str, safe_open] = {}
        self._fresh = {name: values for name, values in (fresh or {}).items() if name not in self._files}

    def _find_files(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.exists():
            try:
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UserError(f"{index}: not a safetensors index ({error})") from None
        if not (self.folder / SINGLE).exists():
            raise UserError(f"{self.folder}: no {SINGLE} and no {INDEX}; weights must be safetensors files")
        with self._handle(SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)

    def _handle(self, name: str, wanted: str = "") -> safe_open:
        path, why = self.folder / name, f"; it should hold {wanted}" if wanted else ""
        try:
            return safe_open(path, framework="pt")
        except FileNotFoundError:
            raise UserError(f"{path}: missing, although {INDEX} names it{why}") from None
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: not a readable safetensors file ({error}){why}") from None

    def check(self, shapes: Mapping[str, Shard]) -> None:
        """UserError for the first tensor that the files lack or hold in another shape, and for a damaged file.

        `shapes` is the table's `huggingface()` view. Only the heads of the files are read.
        """
        for tensor, shard in shapes.items():
            if tensor in self._fresh:
                continue
            view = self._slice(tensor, full_box(shard.shape))
            if tuple(view.get_shape()) != shard.shape:
                raise UserError(
                    f"{self.folder / self._files[tensor]}: tensor {tensor!r} has shape {tuple(view.get_shape())}, "
                    f"config.json says {shard.shape}"
                )
            if view.get_dtype() not in _FLOATS:
                raise UserError(
                    f"{self.folder / self._files[tensor]}: tensor {tensor!r} is {view.get_dtype()}; "
                    f"weights must be {', '.join(_FLOATS)}, so convert the checkpoint first"
                )

    def read(self, tensor: str, box: Box) -> Tensor:
        """One box of a tensor; UserError where it is missing."""
        if tensor in self._fresh:
            return self._fresh[tensor][slices(box)]
        try:
            return self._slice(tensor, box)[slices(box)]
        except SafetensorError as error:
            raise UserError(
                f"{self.folder / self._files[tensor]}: the box {box} of {tensor!r} cannot be read ({error})"
            ) from None

    def _slice(self, tensor: str, box: Box) -> Any:
        name = self._files.get(tensor)
        if name is None:
            raise UserError(
                f"{self.folder}: the checkpoint has no tensor {tensor!r}, of which config.json asks for the box {box}"
            )
        if name not in self._open:
            self._open[name] = self._handle(name, f"the box {box} of {tensor!r}")
        try:
            return self._open[name].get_slice(tensor)
        except SafetensorError:
            raise UserError(
                f"{self.folder / name}: no tensor {tensor!r} with the box {box}, although {INDEX} says so"
            ) from None

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._open.clear()


def load_shards(reader: CheckpointReader, shards: Mapping[str, Shard], parameters: Mapping[str, Tensor]) -> None:
    """Fill the parameters of one rank in place, reading only its boxes; declared padding becomes 0.

    Parameters without a shard, or shards without one, are our mistake.
    """
    if shards.keys() != parameters.keys():
        raise ValueError(f"table and model name different parameters: {sorted(shards.keys() ^ parameters.keys())}")
    for name, shard in shards.items():
        parameter = parameters[name].detach()
        if tuple(parameter.shape) != shard.shape:
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}, the weight table says {shard.shape}")
        for piece in shard.pieces:
            room = parameter[slices(piece.target)]
            room.copy_(reader.read(piece.tensor, piece.source).view(room.shape))
        for box in shard.padding:
            parameter[slices(box)] = 0


class CheckpointWriter:
    """A model directory in the making: the same layout of files on every process, each writes its own boxes."""

    def __init__(
        self, folder: str | Path, shapes: Mapping[str, Shard], dtype: torch.dtype, file_bytes: int = 5 * 10**9
    ) -> None:
        self.folder, self._dtype = Path(folder), dtype
        self._shapes = {name: shard.shape for name, shard in shapes.items()}
        groups = _split_by_size(self._shapes, dtype.itemsize, file_bytes)
        many = len(groups) > 1
        self._headers: dict[str, bytes] = {}
        self._places: dict[str, tuple[str, int]] = {}
        for number, group in enumerate(groups, 1):
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if many else SINGLE
            self._headers[name], offsets = header({t: (dtype, self._shapes[t]) for t in group})
            self._places |= {tensor: (name, offset) for tensor, offset in offsets.items()}

    def create(self) -> None:
        """Make the empty files with their headers; one process does it, before any writes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, head in self._headers.items():
            last = max(offset + self._bytes(tensor) for tensor, (file, offset) in self._places.items() if file == name)
            with open(self.folder / name, "wb") as file:
                file.write(head)
                file.truncate(last)
        if len(self._headers) > 1:
            weight_map = {tensor: file for tensor, (file, _) in self._places.items()}
            total = sum(self._bytes(tensor) for tensor in self._shapes)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")

    def write(self, tensor: str, box: Box, values: Tensor) -> None:
        """Write one box of a tensor; boxes of different processes must not overlap."""
        name, offset = self._places[tensor]
        shape = self._shapes[tensor]
        data = values.detach().to(self._dtype).contiguous().cpu().reshape(box_shape(box))
        descriptor = os.open(self.folder / name, os.O_WRONLY)
        try:
            for start, run in _contiguous_runs(shape, box, data):
                # Not through numpy: a storage that it has seen can never be resized again.
                content = ctypes.string_at(run.data_ptr(), run.nbytes)
                os.pwrite(descriptor, content, offset + start * self._dtype.itemsize)
        finally:
            os.close(descriptor)

    def _bytes(self, tensor: str) -> int:
        return math.prod(self._shapes[tensor]) * self._dtype.itemsize


def _contiguous_runs(shape: tuple[int, ...], box: Box, data: Tensor) -> list[tuple[int, Tensor]]:
    """(element offset in the tensor, flat values) of each run of the box that is contiguous in the tensor."""
    if len(shape) == 1 or box[1:] == full_box(shape[1:]):
        return [(box[0][0] * math.prod(shape[1:]), data.reshape(-1))]
    inner = math.prod(shape[1:])
    return [
        (row * inner + start, run)
        for row, part in zip(range(*box[0]), data, strict=True)
        for start, run in _contiguous_runs(shape[1:], box[1:], part)
    ]


def _split_by_size(shapes: Mapping[str, tuple[int, ...]], itemsize: int, limit: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        own = numel(full_box(shape)) * itemsize
        if groups[-1] and size + own > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += own
    return groups
