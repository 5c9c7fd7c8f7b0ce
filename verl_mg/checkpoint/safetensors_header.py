"""The head of a safetensors file: which tensors stand in it, and where."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The head of a file with these types and shapes, one after another, and where in the file each begins."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    begins = {}
    for name, (dtype, shape) in tensors.items():
        stop = start + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        begins[name] = start
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned to eight bytes
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, begin in begins.items()}
