"""Arrow's arrays from their buffers. `pyarrow.array` makes them too, but imports pandas: three CPU seconds of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa


def numbers(values: np.ndarray, kind: pa.DataType | None = None, absent: np.ndarray | None = None) -> pa.Array:
    """Returns numbers or booleans, as `kind` if it is given, null where `absent` is true."""
    kind = kind or pa.from_numpy_dtype(values.dtype)
    converted = np.ascontiguousarray(values, kind.to_pandas_dtype())
    bits = np.packbits(converted, bitorder="little") if pa.types.is_boolean(kind) else converted
    return pa.Array.from_buffers(kind, len(values), [_valid(absent), pa.py_buffer(bits)])


def texts(values: Sequence[str | None]) -> pa.Array:
    """Returns texts, null where one is None."""
    encoded = [(value or "").encode() for value in values]
    buffers = [_offsets([len(text) for text in encoded]), pa.py_buffer(b"".join(encoded))]
    absent = np.array([value is None for value in values], np.bool_)
    return pa.Array.from_buffers(pa.string(), len(values), [_valid(absent), *buffers])


def lists(lengths: Sequence[int] | np.ndarray, entries: pa.Array, absent: np.ndarray | None = None) -> pa.ListArray:
    """Returns lists of as many of the entries as `lengths` says, one after another."""
    buffers = [_valid(absent), _offsets(lengths)]
    return pa.Array.from_buffers(pa.list_(entries.type), len(lengths), buffers, children=[entries])


def maps(lengths: Sequence[int] | np.ndarray, keys: pa.Array, items: pa.Array) -> pa.MapArray:
    """Returns maps of as many of the entries as `lengths` says, one after another."""
    return pa.MapArray.from_arrays(lists(lengths, items).offsets, keys, items)


def _valid(absent: np.ndarray | None) -> pa.Buffer | None:
    return None if absent is None else pa.py_buffer(np.packbits(~absent, bitorder="little"))


def _offsets(lengths: Sequence[int] | np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.cumsum([0, *lengths], dtype=np.int32))
