"""Data types of tensors by torch's names for them, so that plans are made without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint8", "bool"), 1),
}
"""Bytes of an element."""


def is_integer(dtype: str) -> bool:
    """Returns whether elements are integers or truth values."""
    return "float" not in dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Returns the dtype that has a name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype
