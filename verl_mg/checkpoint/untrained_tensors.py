"""Tensors of a model directory that a backend does not have, such as a vision tower: an export copies their bytes."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

import torch

from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.checkpoint.safetensors_file import DTYPES, SafetensorsFile
from verl_mg.errors import UserError


class UntrainedTensors:
    """Tensors that are copied from a directory.

    Attributes:
        shapes: {name: shape}.
        dtypes: {name: dtype}.
    """

    def __init__(self, directory: ModelDirectory, shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str]) -> None:
        self._directory, self._names_of_dtypes, self.shapes = directory, dtypes, shapes
        self.dtypes: dict[str, torch.dtype] = {name: DTYPES[dtype] for name, dtype in dtypes.items()}
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
