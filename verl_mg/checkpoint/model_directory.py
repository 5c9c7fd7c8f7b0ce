"""Model directories in Hugging Face's format: which file has each tensor, found and checked by one rank for all.

rank 0         index, and the header of each file: names, shapes, dtypes -> broadcasts {file: names of its tensors}
other ranks    wait for it, and open only files from which they read boxes
"""

from __future__ import annotations

import json
import logging
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from verl_mg.checkpoint.quantized import (
    FP8,
    PACKED,
    block_of,
    declared_block,
    has_scale_dtype,
    misfit,
    packed_names,
    packed_shapes,
    scale_name,
)
from verl_mg.checkpoint.safetensors_file import DTYPE_NAMES, DamagedFileError, SafetensorsFile, StoredTensor
from verl_mg.distributed.collectives import broadcast_bytes
from verl_mg.dtypes import dtype_name
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import
from verl_mg.models.hf_config import INDEX, SINGLE, weight_map
from verl_mg.models.tensor_index import TensorIndex
from verl_mg.models.tensor_tree import StackedTensor
from verl_mg.sharding.boxes import BlockSize, Box, Shard, full_box

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
else:
    dist = lazy_import("torch.distributed")

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"  # files of PEFT
_FLOATS = tuple(DTYPE_NAMES[dtype] for dtype in ("float32", "bfloat16", "float16"))
NO_INDEX = TensorIndex({}, tied=False)  # of tensors that are read under their names in files
_FREQUENCIES = ".inv_freq"  # of rotary embedding, which old files have and every model computes

log = logging.getLogger(__name__)


def _without_weights(folder: Path) -> str:
    """Returns what a directory without the files of a model has instead, and the remedy."""
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    if ADAPTER in names:
        return f"{folder}: contains {ADAPTER}, but not the model that it adapts. Set lora.path to it, or merge both."
    if names:
        return f"{folder}: contains {names[0]}, but no {INDEX} names it. Download the index, or name the file {SINGLE}."
    return f"{folder}: no {SINGLE} and no {INDEX}. Convert the weights to safetensors files."


@dataclass(eq=False)
class ModelDirectory:
    """A Hugging Face directory and the file of each of its tensors."""

    folder: Path
    file_of: Mapping[str, str]  # name of the file of each tensor
    block: BlockSize | None = None  # rows and columns of the blocks of FP8 tensors with one scale; None: of no blocks
    stacked: Mapping[str, StackedTensor] = field(default_factory=dict)  # places in stacks, see `TensorIndex.stacked`
    _headers: dict[str, Mapping[str, StoredTensor]] = field(default_factory=dict)

    @classmethod
    def find(cls, folder: str | Path, stacked: Mapping[str, StackedTensor] | None = None) -> ModelDirectory:
        """Reads the index of a directory, or the header of its only file; UserError where it has neither."""
        folder = Path(folder)
        if (folder / ADAPTER_CONFIG).exists() and ((folder / INDEX).exists() or (folder / SINGLE).exists()):
            raise UserError(
                f"{folder / ADAPTER_CONFIG}: adapters of another model, which transformers loads instead of this one. "
                "Move both files of the adapters to a separate folder, and set lora.path to it."
            )
        files = weight_map(folder)
        directory = cls(folder, files or {}, declared_block(folder), stacked or {})
        if files is not None:
            return directory
        if not (folder / SINGLE).exists():
            raise UserError(_without_weights(folder))
        header = directory.open(SINGLE).tensors
        directory.file_of, directory._headers[SINGLE] = dict.fromkeys(header, SINGLE), header
        return directory

    def open(self, name: str, wanted: str = "") -> SafetensorsFile:
        """Opens a file of the directory; `wanted` describes what is needed of it, for the error."""
        path, why = self.folder / name, f"; it should contain {wanted}" if wanted else ""
        try:
            return SafetensorsFile(path)
        except FileNotFoundError:
            raise UserError(f"{path}: missing, although {INDEX} names it{why}. Download the model again.") from None
        except (OSError, DamagedFileError) as error:
            raise UserError(
                f"{path}: not a readable safetensors file ({error}){why}. Download the model again."
            ) from None

    def file_with(self, tensor: str, box: Box) -> str:
        """Returns the name of the file of a tensor; the UserError names the box that is needed."""
        if tensor not in self.file_of:
            raise UserError(
                f"{self.folder}: the checkpoint has no tensor {tensor!r}, of which config.json requires the box {box}. "
                "Use the config.json of these weights."
            )
        return self.file_of[tensor]

    def parts(self, tensor: str) -> tuple[str, ...]:
        """Returns the names of the tensors in files from which a tensor is read: itself or its stack, and scales."""
        place = self.stacked.get(tensor)
        if place is None:
            scales = scale_name(tensor, self.file_of)
            return (tensor, scales) if scales else (tensor,)
        return packed_names(place.name) if self.is_packed(place) else (place.name,)

    def is_packed(self, place: StackedTensor) -> bool:
        """Returns whether the directory has a stacked tensor in MXFP4."""
        return packed_names(place.name)[0] in self.file_of

    def check(
        self,
        shapes: Mapping[str, Shard],
        dtypes: Mapping[str, torch.dtype] | None = None,
        copies: Mapping[str, str] | None = None,
    ) -> None:
        """Raises a UserError for the first tensor of another name, shape or dtype; reads each file's header once.

        A copy {name: tensor that it repeats} that the files have needs the same values.
        """
        integers = {
            name: DTYPE_NAMES[dtype_name(each)] for name, each in (dtypes or {}).items() if not each.is_floating_point
        }
        stacks = {place.name: place for name in shapes if (place := self.stacked.get(name))}
        for place in stacks.values():
            if self.is_packed(place):
                self._check_packed(place)
        whole = {name: place.shape for name, place in stacks.items() if not self.is_packed(place)}
        whole |= {name: shard.shape for name, shard in shapes.items() if name not in self.stacked}
        for tensor, shape in whole.items():
            stored = self._entry(tensor, full_box(shape))
            name = self.file_of[tensor]
            if stored.shape != shape:
                raise self._unfit_shape(tensor, stored.shape, shape)
            if needed := integers.get(tensor):
                if stored.dtype != needed:
                    raise UserError(
                        f"{self.folder / name}: tensor {tensor!r} is {stored.dtype}, but {needed} is needed. "
                        "Download the model again."
                    )
            elif stored.dtype == FP8 and tensor not in stacks:
                self._check_scales(tensor, stored)
            elif stored.dtype not in _FLOATS:
                raise UserError(
                    f"{self.folder / name}: tensor {tensor!r} is {stored.dtype}; "
                    f"supported are {', '.join(_FLOATS)}, and {FP8} with scales. Convert the checkpoint first."
                )

        for name, tensor in (copies or {}).items():
            if name in self.file_of and tensor in shapes and not self._are_equal(name, tensor):
                # transformers 5 then has two matrices, engines one.
                raise UserError(
                    f"{self.folder / self.file_of[name]}: {name!r} has other values than {tensor!r}, but config.json "
                    "ties them. Write tie_word_embeddings: false there, or remove the tensor that is wrong."
                )

    def _are_equal(self, *names: str) -> bool:
        first, second = (self.open(self.file_of[name]).chunks(name) for name in names)
        return all(a == b for a, b in zip_longest(first, second))

    def _check_packed(self, place: StackedTensor) -> None:
        shapes = packed_shapes(place)
        if shapes is None:
            raise UserError(
                f"{self.folder}: {place.name} is in MXFP4, but its rows of {place.shape[1]} elements in config.json "
                "are not made of whole blocks. Use the config.json of these weights."
            )
        for tensor, shape in zip(packed_names(place.name), shapes, strict=True):
            stored = self._entry(tensor, full_box(shape))
            if stored.shape != shape:
                raise self._unfit_shape(tensor, stored.shape, shape)
            if stored.dtype != PACKED:
                raise UserError(
                    f"{self.folder / self.file_of[tensor]}: tensor {tensor!r} is {stored.dtype}, but MXFP4 is stored "
                    f"as {PACKED}. Download the model again."
                )

    def _unfit_shape(self, tensor: str, stored: tuple[int, ...], needed: tuple[int, ...]) -> UserError:
        return UserError(
            f"{self.folder / self.file_of[tensor]}: tensor {tensor!r} has shape {stored}, "
            f"but {needed} in config.json. Use the config.json of these weights."
        )

    def scale_of(self, tensor: str) -> str:
        """Returns the name of the scales of an FP8 tensor; UserError where the directory does not have them."""
        name = scale_name(tensor, self.file_of)
        if name is None:
            raise UserError(
                f"{self.folder / self.file_of[tensor]}: tensor {tensor!r} is {FP8}, but the directory has no scales of "
                f"it ({tensor}_scale_inv). Download the model again."
            )
        return name

    def unfit_scales(self, scales: str, tensor: str, reason: str) -> UserError:
        """Returns the error for scales that do not fit their tensor."""
        return UserError(
            f"{self.folder / self.file_of[scales]}: the scales {scales!r} of {tensor!r} cannot be used ({reason}). "
            "Download the model again."
        )

    def _entry(self, tensor: str, box: Box) -> StoredTensor:
        name = self.file_with(tensor, box)
        if name not in self._headers:
            self._headers[name] = self.open(name, f"the box {box} of {tensor!r}").tensors
        if tensor not in self._headers[name]:
            raise self.missing_in_file(tensor, box)
        return self._headers[name][tensor]

    def _check_scales(self, tensor: str, stored: StoredTensor) -> None:
        scales = self.scale_of(tensor)
        entry = self._entry(scales, ())
        if not has_scale_dtype(entry.dtype, self.block):
            raise self.unfit_scales(scales, tensor, f"they are {entry.dtype}")
        if not block_of(stored.shape, entry.shape, self.block):
            raise self.unfit_scales(scales, tensor, misfit(stored.shape, entry.shape, self.block))

    def missing_in_file(self, tensor: str, box: Box) -> UserError:
        """Returns the error for a tensor that is not in the file which the index names."""
        return UserError(
            f"{self.folder / self.file_of[tensor]}: no tensor {tensor!r} with the box {box}, although {INDEX} lists "
            "it. Download the model again."
        )

    def packed(self) -> bytes:
        """Returns the names of the tensors of each file and the size of blocks, compressed."""
        tensors: dict[str, list[str]] = defaultdict(list)
        for tensor, name in self.file_of.items():
            tensors[name].append(tensor)  # by file, so that a file's name is in the message once
        return zlib.compress(json.dumps([tensors, self.block]).encode(), level=1)

    @classmethod
    def unpacked(
        cls, folder: Path, packed: bytes, stacked: Mapping[str, StackedTensor] | None = None
    ) -> ModelDirectory:
        """Returns the directory that another rank has packed."""
        tensors, block = json.loads(zlib.decompress(packed))
        file_of = {tensor: name for name, names in tensors.items() for tensor in names}
        return cls(folder, file_of, tuple(block) if block else None, stacked or {})


class ModelDirectories:
    """The model directories of a job: rank 0 reads index and headers of each once, for all ranks and roles."""

    def __init__(self) -> None:
        self._by_folder: dict[Path, ModelDirectory] = {}
        self._reported: set[Path] = set()

    def open(
        self,
        folder: Path,
        shapes: Mapping[str, Shard],
        optional: frozenset[str] = frozenset(),
        index: TensorIndex = NO_INDEX,
    ) -> ModelDirectory:
        """Returns the files of tensors, of which some are `optional`, after rank 0 has checked them; a collective."""
        packed = self._checked(folder, shapes, optional, index).packed() if dist.get_rank() == 0 else b""
        # The others wait here, so they open no file of a directory that has not been checked.
        return ModelDirectory.unpacked(folder, broadcast_bytes(packed), index.stacked)

    def report_unread(self, folder: Path, known: Collection[str]) -> None:
        """Logs once for a folder, on rank 0, which of its tensors are not `known` to the model of its config.json."""
        directory = self._by_folder.get(folder)
        if directory is None or folder in self._reported:
            return
        self._reported.add(folder)
        read = {part for name in known for part in (name, *directory.parts(name))}
        if unread := sorted(name for name in directory.file_of.keys() - read if not name.endswith(_FREQUENCIES)):
            log.warning(
                "%s: config.json has no place for %d of the %d tensors of the files, which are not read: %s%s",
                folder, len(unread), len(directory.file_of), ", ".join(unread[:3]), ", ..." * (len(unread) > 3),
            )  # fmt: skip

    def _checked(
        self,
        folder: Path,
        shapes: Mapping[str, Shard],
        optional: frozenset[str],
        index: TensorIndex,
    ) -> ModelDirectory:
        if not shapes:
            return ModelDirectory(folder, {})
        if folder not in self._by_folder:
            self._by_folder[folder] = ModelDirectory.find(folder, index.stacked)
        directory = self._by_folder[folder]
        absent = optional - directory.file_of.keys()  # such as a value head, which then gets initial values
        present = {name: shard for name, shard in shapes.items() if name not in absent}
        directory.check(present, index.dtypes, index.copies)
        # Only the requested tensors and what they are read from travel to the other ranks.
        file_of: dict[str, str] = {}
        for name in present:
            parts = directory.parts(name)
            file_of |= {part: directory.file_of[part] for part in parts} | {name: directory.file_of[parts[0]]}
        return ModelDirectory(folder, file_of, directory.block, index.stacked)
