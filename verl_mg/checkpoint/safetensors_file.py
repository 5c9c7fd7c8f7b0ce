"""The safetensors format: the header of a file to write, and a reader of boxes.

    8 bytes: length of the header    header: JSON {name: {dtype, shape, data_offsets}}    data without gaps

The reader opens its file once; `safe_open` of the safetensors package opens it twice.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_mg.dtypes import ITEM_BYTES, dtype_name, torch_dtype
from verl_mg.lazy_import import lazy_import
from verl_mg.sharding.boxes import Box, slices

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Names of dtypes in safetensors files, by torch's."""
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}  # torch's names by those in safetensors files
_LENGTH_BYTES = 8
_LONGEST_HEADER = 10**8  # the format's limit
_CHUNK_BYTES = 2**26  # of a copy in memory at a time


class DamagedFileError(ValueError):
    """The file does not follow the safetensors format."""


@dataclass(frozen=True)
class StoredTensor:
    """Entry of a tensor in the header of a file."""

    dtype: str  # name of the dtype, such as BF16; it may be one that cannot be read
    shape: tuple[int, ...]  # shape of the tensor
    start: int  # offset of the first byte, counted from the end of the header
    stop: int  # offset after the last byte


def header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Returns the header of a file with these tensors, and the offset at which each begins in the file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    begins = {}
    for name, (dtype, shape) in tensors.items():
        stop = start + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype_name(dtype)], "shape": list(shape), "data_offsets": [start, stop]}
        begins[name] = start
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # the format requires data aligned to eight bytes
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return head, {name: len(head) + begin for name, begin in begins.items()}


class SafetensorsFile:
    """A safetensors file that is mapped into memory, of which boxes of tensors are read.

    OSError for a file that cannot be opened, DamagedFileError for a header that does not describe the bytes after it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _LENGTH_BYTES:
                raise DamagedFileError("the header is too short")
            # A private mapping: torch warns of memory that it may not write.
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        length = int.from_bytes(self._memory[:_LENGTH_BYTES], "little")
        self._data = _LENGTH_BYTES + length
        if length > _LONGEST_HEADER or self._data > size:
            raise DamagedFileError("the header is longer than the file")
        self.tensors = _parse(self._memory[_LENGTH_BYTES : self._data])
        _check_offsets(self.tensors, size - self._data)

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yields the bytes of a tensor in order; KeyError where the file does not contain it."""
        entry = self.tensors[name]
        for start in range(entry.start, entry.stop, _CHUNK_BYTES):
            yield self._memory[self._data + start : self._data + min(start + _CHUNK_BYTES, entry.stop)]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Returns a box of a tensor, by default all of it, as a view of the mapped file; KeyError for another name."""
        entry = self.tensors[name]
        if entry.dtype not in DTYPES:
            raise DamagedFileError(f"the dtype {entry.dtype} of {name!r} cannot be read")
        dtype, count = torch_dtype(DTYPES[entry.dtype]), math.prod(entry.shape)
        if not count:  # `frombuffer` refuses a count of 0
            return torch.empty(entry.shape, dtype=dtype)
        whole = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._data + entry.start)
        values = whole.view(entry.shape)
        return values if box is None else values[slices(box)]


def _parse(text: bytes) -> dict[str, StoredTensor]:
    try:
        fields: dict[str, Any] = json.loads(text)
        return {
            name: _entry(entry["dtype"], entry["shape"], entry["data_offsets"])
            for name, entry in fields.items()
            if name != "__metadata__"
        }
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"the header is damaged: {error}") from None


def _entry(dtype: str, shape: list[int], data_offsets: list[int]) -> StoredTensor:
    start, stop = data_offsets
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, stop)):
        raise ValueError("a number in it is not a size")
    size = math.prod(shape) * ITEM_BYTES[DTYPES[dtype]] if dtype in DTYPES else stop - start
    if size != stop - start:
        raise ValueError(f"a tensor of shape {tuple(shape)} and dtype {dtype} has {stop - start} bytes")
    return StoredTensor(str(dtype), tuple(shape), start, stop)


def _check_offsets(tensors: Mapping[str, StoredTensor], size: int) -> None:
    # The format requires that the tensors cover the data: a file that was cut off is found without reading it.
    end = 0
    for entry in sorted(tensors.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            raise DamagedFileError(f"the tensors leave a gap or overlap at byte {end}")
        end = entry.stop
    if end != size:
        raise DamagedFileError(f"the tensors have {end} bytes, the file has {size}")
