"""Encodings of weights on the wire: formats of quantized engines, computed from the largest magnitude of each block.

    fp8_block     float8_e4m3fn, a float32 scale for each block of 128 x 128: `weight`, `weight_scale_inv`
    fp8_channel   float8_e4m3fn, a float32 scale for each row: `weight`, `weight_scale`
    mxfp8         float8_e4m3fn, a power of two for each 32 of a row, as E8M0 in uint8: `weight`, `weight_scale_inv`
    int4          8 integers of a row in an int32, a scale for each 128 of a row: `weight_packed`, `weight_scale`

Once the largest magnitude of a block is known, each of its elements is quantized by itself. So a rank can quantize any
part of a block, with the same values as if it had the whole tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Literal

from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import
from verl_mg.sharding.boxes import BlockSize, Box, box_shape, scale_grid, slices

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

Wire = Literal["cast", "fp8_block", "fp8_channel", "mxfp8", "int4"]
"""Form in which the weights of an engine travel; `cast`: in its dtype, not quantized."""
SLAB_ELEMENTS = 2**20  # elements that are quantized at a time, which bounds the memory of intermediate values
_FP8_MAX = 448.0  # the largest value of float8_e4m3fn


@dataclass(frozen=True)
class Encoding(ABC):
    """A format of quantized matrices; each block of elements has a scale."""

    wire: Wire
    """Its name, for messages."""
    dtype: str
    """Name of the dtype of the values on the wire."""
    scale_dtype: str | None
    """Name of the dtype of the scales; None: the model's."""
    scale_suffix: str
    """End of the names of scales, after the name of the parameter."""
    value_suffix: str = ""
    """End of the names of values, after the name of the parameter."""
    rows: int = 128
    columns: int | None = 128
    """Columns of a block; None: all of the tensor."""
    packed: int = 1
    """Columns in one element on the wire."""
    tile: BlockSize | None = None
    """Rows and columns of which the parts of a tensor in an engine must be multiples; None: any.

    Engines have experts and latent attention in other forms where a kernel has tiles.
    """

    def block(self, shape: tuple[int, ...]) -> BlockSize:
        """Returns the rows and columns of the blocks of a matrix."""
        return self.rows, self.columns or shape[-1]

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the scales of a matrix."""
        return scale_grid(shape, self.block(shape))

    @abstractmethod
    def scales(self, largest: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the scales of blocks from the largest magnitude of each, float32; `dtype`: that of the model."""

    @abstractmethod
    def quantize(self, values: Tensor, scales: Tensor) -> Tensor:
        """Returns values (..., columns) as they are on the wire, but for a cast; `scales` are broadcast to them."""


@dataclass(frozen=True)
class FP8(Encoding):
    """Values in float8_e4m3fn; the largest one of a block is the largest that the dtype has."""

    wire: Wire = "fp8_block"
    dtype: str = "float8_e4m3fn"
    scale_dtype: str | None = "float32"
    scale_suffix: str = "_scale_inv"
    smallest: float = 1e-4
    """Smallest value that is taken for the largest magnitude of a block."""
    by_reciprocal: bool = False
    """Whether values are multiplied by the rounded reciprocal of the scale, as vLLM does, and not divided by it."""

    def scales(self, largest: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the largest magnitude over the largest value of float8_e4m3fn."""
        return largest.clamp(min=self.smallest) / _FP8_MAX

    def quantize(self, values: Tensor, scales: Tensor) -> Tensor:
        """Returns float32 values for float8_e4m3fn, which are 0 in a block with scale 0."""
        # As the quantizer of each engine computes: vLLM multiplies by the rounded reciprocal, SGLang divides.
        if self.by_reciprocal:
            factors = torch.where(scales == 0, scales, scales.reciprocal())
            return (values.float() * factors).clamp_(-_FP8_MAX, _FP8_MAX)
        return values.float() / scales


@dataclass(frozen=True)
class MXFP8(Encoding):
    """Values in float8_e4m3fn, scales in E8M0 (OCP Microscaling Formats, version 1.0, sections 5.3.1 and 5.4.1)."""

    wire: Wire = "mxfp8"
    dtype: str = "float8_e4m3fn"
    scale_dtype: str | None = "uint8"  # the bytes of float8_e8m0fnu, as SGLang's parameters have them
    scale_suffix: str = "_scale_inv"
    rows: int = 1
    columns: int | None = 32
    tile: BlockSize | None = (32, 32)  # of the products of FlashInfer

    def scales(self, largest: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the smallest powers of two with which no value is beyond the largest one of float8_e4m3fn."""
        # The specification's own conversion (section 6.3) rounds the exponent down, by which the largest values of a
        # block may be cut off; the quantizers of the engines round it up. 2 ** -127 is the smallest number of E8M0.
        fraction, exponent = torch.frexp(largest.clamp(min=_FP8_MAX * 2.0**-127))
        full, power = math.frexp(_FP8_MAX)  # fractions are compared, since a quotient would be rounded
        biased = exponent + (fraction > full).int() - power + 127
        return biased.where(largest.isfinite(), 255).to(torch.uint8)  # 255 is E8M0's NaN

    def quantize(self, values: Tensor, scales: Tensor) -> Tensor:
        """Returns float32 values for float8_e4m3fn; the division by a power of two is exact."""
        # GPU: the device divides and casts, for the bits that SGLang's quantizer makes there.
        # GPU-TEST: tests/reshard/test_encoding.py::test_mxfp8_of_every_bfloat16_equals_an_engine_bitwise
        # GPU-RAN: not yet
        return values.float() / scales.view(torch.float8_e8m0fnu).float()


@dataclass(frozen=True)
class Int4(Encoding):
    """Integers from -8 to 7, eight in an int32, in the format `pack-quantized` of compressed-tensors."""

    wire: Wire = "int4"
    dtype: str = "int32"
    scale_dtype: str | None = None
    scale_suffix: str = "_scale"
    value_suffix: str = "_packed"
    rows: int = 1
    packed: int = 8
    tile: BlockSize | None = (64, 128)  # of Marlin, the kernel of both engines

    def scales(self, largest: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the largest magnitude over half of the range from -8 to 7, rounded to the dtype of the model."""
        scales = largest.to(dtype) / 7.5
        return torch.where(scales == 0, torch.full_like(scales, torch.finfo(dtype).eps), scales)

    def quantize(self, values: Tensor, scales: Tensor) -> Tensor:
        """Returns (rows, columns / 8) int32; the first of eight columns is in the lowest bits."""
        numbers = (values / scales).clamp_(-8, 7).round_().to(torch.int32) + 8
        # Two numbers are in the two bytes of an int16: shifted by half a byte, they are in its lower byte.
        pairs = numbers.to(torch.uint8).view(torch.int16)
        return (pairs | pairs >> 4).to(torch.uint8).view(torch.int32)


def encoding_of(wire: Wire, by_reciprocal: bool = False) -> Encoding | None:
    """Returns an encoding by its name; None for `cast`.

    `by_reciprocal`: the engine's quantizer of blocks multiplies by the reciprocal of a scale, as vLLM's does.
    """
    match wire:
        case "fp8_block":
            return FP8(by_reciprocal=by_reciprocal)
        case "fp8_channel":
            return FP8(wire, scale_suffix="_scale", rows=1, columns=None, smallest=0.0, by_reciprocal=True)
        case "mxfp8":
            return MXFP8()
        case "int4":
            return Int4()
    return None


def add_largest(largest: Tensor, values: Tensor, box: Box, block: BlockSize) -> None:
    """Raises the largest magnitudes (block rows, block columns) of a whole tensor by the elements of a box of it."""
    # Bits without the sign have the order of magnitudes, NaN is the largest; a CPU compares integers much faster.
    integers = values.view(torch.int16 if values.dtype.itemsize == 2 else torch.int32)
    without_sign = torch.iinfo(integers.dtype).max
    for part, blocks in _slabs(box, block):
        bits = _by_block(integers[part] & without_sign, blocks)
        by_columns = bits.amax(1) if bits.shape[1] > 1 else bits[:, 0]
        before = largest[slices(blocks)]
        before.copy_(torch.maximum(before, by_columns.amax(-1).view(values.dtype).float()))


def encode_box(encoding: Encoding, values: Tensor, scales: Tensor, box: Box, target: Tensor) -> None:
    """Quantizes the elements of a box into `target` (rows, columns / packed); `scales` are of the whole tensor."""
    block = encoding.rows, encoding.columns or box[1][1]  # the scale of a row is that of all its columns
    for (rows, columns), blocks in _slabs(box, block):
        at = rows, slice(columns.start // encoding.packed, columns.stop // encoding.packed)
        # Scales are broadcast over their blocks: repeated for each element they would be larger than the values.
        factors = scales[slices(blocks)][:, None, :, None]
        _by_block(target[at], blocks).copy_(encoding.quantize(_by_block(values[rows, columns], blocks), factors))


def _by_block(values: Tensor, blocks: Box) -> Tensor:
    """Views a matrix as (block rows, rows of a block, block columns, columns of a block)."""
    height, width = box_shape(blocks)
    return values.unflatten(1, (width, -1)).unflatten(0, (height, -1))


def _slabs(box: Box, block: BlockSize) -> Iterator[tuple[tuple[slice, slice], Box]]:
    """Yields the parts of a box that are within one block or consist of whole ones, and the box of these blocks."""
    (top, _), (left, _) = box
    for (start, stop), (first, last) in product(*map(_runs, box, block)):
        step = max(1, SLAB_ELEMENTS // ((last - first) * block[0])) * block[0]
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            blocks = (begin // block[0], -(-end // block[0])), (first // block[1], -(-last // block[1]))
            yield (slice(begin - top, end - top), slice(first - left, last - left)), blocks


def _runs(edges: tuple[int, int], length: int) -> Iterator[tuple[int, int]]:
    """Cuts a range where blocks begin and end: 3:13 with blocks of 4 is 3:4, 4:12 and 12:13."""
    start, stop = edges
    return pairwise(sorted({start, min(stop, -(-start // length) * length), max(start, stop // length * length), stop}))


def check_packing(encoding: Encoding, tensor: str, box: Box) -> None:
    """Raises a UserError where a box begins or ends within an element of the wire."""
    if any(edge % encoding.packed for edge in box[-1]):
        raise UserError(
            f"{tensor}: the box {box} ends within {encoding.packed} columns that one number on the wire contains. "
            "Choose a layout whose parts of a row are multiples of it."
        )
