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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verl_mg.dtypes import torch_dtype
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import
from verl_mg.sharding.boxes import BlockSize, Box, scale_grid

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
        """Returns values (rows, columns) on the wire; `scales` are broadcast to their shape."""


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
        """Returns float8_e4m3fn values, which are 0 in a block with scale 0."""
        # As the quantizer of each engine computes: vLLM multiplies by the rounded reciprocal, SGLang divides.
        if self.by_reciprocal:
            factors = torch.where(scales == 0, scales, scales.reciprocal())
            return (values.float() * factors).clamp(-_FP8_MAX, _FP8_MAX).to(torch_dtype(self.dtype))
        return (values.float() / scales).to(torch_dtype(self.dtype))


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
        """Returns float8_e4m3fn values; the division by a power of two is exact."""
        # GPU: the device divides and casts, for the bits that SGLang's quantizer makes there.
        # GPU-TEST: tests/reshard/test_encoding.py::test_mxfp8_of_every_bfloat16_equals_an_engine_bitwise
        # GPU-RAN: not yet
        return (values.float() / scales.view(torch.float8_e8m0fnu).float()).to(torch_dtype(self.dtype))


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
        numbers = (values / scales).clamp(-8, 7).round().to(torch.int32) + 8
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=values.device)
        # The eighth number fills the sign bit: shifted and added as int64, then cut to 32 bits.
        words = (numbers.unflatten(-1, (-1, self.packed)).long() << shifts).sum(-1)
        return torch.where(words >= 2**31, words - 2**32, words).int()


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
    (top, bottom), (left, right) = box
    height, width = block
    columns = slice(left // width, -(-right // width))
    one_column = columns.stop - columns.start == 1
    step = max(1, SLAB_ELEMENTS // ((right - left) * height)) * height
    for start in range(top - top % height, bottom, step):  # slabs of whole block rows
        first, last = max(start, top), min(start + step, bottom)
        magnitudes = values[first - top : last - top].abs()
        # Blocks that the box cuts are filled with zeros.
        sides = (0, 0) if one_column else (left % width, -right % width)
        margins = (*sides, first - start, -last % height)
        magnitudes = torch.nn.functional.pad(magnitudes, margins) if any(margins) else magnitudes
        across = magnitudes.shape[1] if one_column else width
        of_blocks = magnitudes.view(-1, height, magnitudes.shape[1] // across, across).amax((1, 3)).float()
        part = largest[start // height : -(-last // height), columns]
        part.copy_(torch.maximum(part, of_blocks))


def encode_box(encoding: Encoding, values: Tensor, scales: Tensor, box: Box, target: Tensor) -> None:
    """Quantizes the elements of a box into `target` (rows, columns / packed); `scales` are of the whole tensor."""
    (top, bottom), (left, right) = box
    columns = torch.arange(left, right, device=values.device) // encoding.columns if encoding.columns else None
    step = max(1, SLAB_ELEMENTS // (right - left))
    for start in range(top, bottom, step):
        stop = min(start + step, bottom)
        factors = scales[torch.arange(start, stop, device=values.device) // encoding.rows]
        factors = factors if columns is None else factors[:, columns]
        target[start - top : stop - top] = encoding.quantize(values[start - top : stop - top], factors)


def check_packing(encoding: Encoding, tensor: str, box: Box) -> None:
    """Raises a UserError where a box begins or ends within an element of the wire."""
    if any(edge % encoding.packed for edge in box[-1]):
        raise UserError(
            f"{tensor}: the box {box} ends within {encoding.packed} columns that one number on the wire contains. "
            "Choose a layout whose parts of a row are multiples of it."
        )
