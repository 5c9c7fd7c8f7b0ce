"""FP8 and MXFP4 tensors of model directories: their scales, and dequantization of single boxes.

    ...up_proj.weight             float8_e4m3fn (rows, columns)
    ...up_proj.weight_scale_inv   (ceil(rows / 128), ceil(columns / 128)): factor of each block, as DeepSeek-V3 has them
    ...up_proj.weight_scale       (), (1,), (rows,) or (rows, 1): factor of the tensor or of each row

    ...up_proj.weight_scale_inv   uint8 (rows, columns / 32): exponent of two of each block, plus 127, in MXFP8

The product is computed in float32, as `transformers` does (`Fp8Dequantize` in integrations/finegrained_fp8.py). Blocks
have the size in config.json, and the last ones may be incomplete, as in DeepSeek-V3's projection to 576 rows;
`transformers` 5.19 derives the size from the shapes, and refuses these.

    ...experts.gate_up_proj_blocks   uint8 (experts, rows, columns / 32, 16): two elements a byte, the lower half first
    ...experts.gate_up_proj_scales   uint8 (experts, rows, columns / 32): exponent of two of each block, plus 127

gpt-oss's checkpoints have these MXFP4 tensors in place of `...experts.gate_up_proj`, whose matrices are the transposed
ones. An element is E2M1 (OCP Microscaling Formats, version 1.0, section 5.3.3), its product with the scale exact in
bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

from verl_mg.checkpoint.safetensors_file import DTYPE_NAMES
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import
from verl_mg.models.hf_config import read_json
from verl_mg.models.tensor_tree import StackedTensor
from verl_mg.models.transformers_module import BLOCKS, SCALES
from verl_mg.sharding.boxes import BlockSize, Box, scale_grid

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

FP8 = DTYPE_NAMES["float8_e4m3fn"]  # name of the dtype of FP8 tensors in safetensors files
PACKED = DTYPE_NAMES["uint8"]  # name of the dtype of MXFP4 tensors, and of scales in MXFP8
SCALE_DTYPES = tuple(DTYPE_NAMES[dtype] for dtype in ("float32", "bfloat16", "float16", "float8_e8m0fnu"))
"""Names of the dtypes of scales."""
MXFP8_BLOCK: BlockSize = (1, 32)  # with these blocks the bytes of E8M0 may be stored as uint8
_SLAB = 256  # rows whose factors are in memory at a time
_SUFFIXES = ("_scale_inv", "_scale")
MXFP4_BLOCK = 32  # elements of a row that have a common scale
_BIAS, _NOT_A_NUMBER = 127, 255  # of E8M0, the format of scales
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def has_scale_dtype(dtype: str, declared: BlockSize | None) -> bool:
    """Returns whether scales can be of a dtype, by its name, with the size of blocks in config.json."""
    return dtype in SCALE_DTYPES or (dtype == PACKED and declared == MXFP8_BLOCK)


def scale_name(tensor: str, names: Container[str]) -> str | None:
    """Returns the name of the scales of a tensor; None where there are none."""
    return next((tensor + suffix for suffix in _SUFFIXES if tensor + suffix in names), None)


def declared_block(folder: Path) -> BlockSize | None:
    """Returns the size of the blocks in the quantization_config of config.json; None where it names none."""
    path = folder / "config.json"
    try:
        block = read_json(path)["quantization_config"]["weight_block_size"]
    except (OSError, ValueError, LookupError, TypeError):  # a damaged config.json is an error where the model is read
        return None
    match block:
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise UserError(
        f"{path}: quantization_config.weight_block_size is {block!r}, not two sizes. Download the model again."
    )


def block_of(shape: tuple[int, ...], scales: tuple[int, ...], declared: BlockSize | None) -> BlockSize | None:
    """Returns the rows and columns that have a common scale; None where the scales do not fit the tensor."""
    if len(shape) != 2:
        return None
    if declared:
        return declared if scales == scale_grid(shape, declared) else None
    if math.prod(scales) == 1:  # of the whole tensor, with shape () or (1,)
        return shape[0], shape[1]
    return (1, shape[1]) if scales in ((shape[0],), (shape[0], 1)) else None


def misfit(shape: tuple[int, ...], scales: tuple[int, ...], declared: BlockSize | None) -> str:
    """Returns the reason for which `block_of` returned None."""
    wanted = f"blocks of {declared} in config.json" if declared else "one scale for the tensor or for each row"
    return f"their shape is {scales}, which does not fit the tensor's shape {shape} and {wanted}"


def dequantize(values: Tensor, scales: Tensor, box: Box, block: BlockSize) -> Tensor:
    """Returns a box of an FP8 tensor times its scales, float32; ValueError for a negative or infinite scale."""
    (top, bottom), (left, right) = box
    height, width = block
    first, last = left // width, -(-right // width)
    scales = scales.view(torch.float8_e8m0fnu) if scales.dtype is torch.uint8 else scales
    grid = scales if scales.dim() == 2 else scales.reshape(-1, 1)
    needed = grid[top // height : -(-bottom // height), first:last].float()
    if not (needed.isfinite() & (needed >= 0)).all():
        raise ValueError("a scale is negative or not finite")
    columns = torch.arange(left, right) // width - first
    result, rows = values.float(), torch.arange(top, bottom) // height - top // height
    for start in range(0, len(rows), _SLAB):
        # In place, some rows at a time: the factors of all elements would be as large as the box.
        result[start : start + _SLAB] *= needed[rows[start : start + _SLAB]][:, columns]
    return result


def packed_names(stack: str) -> tuple[str, str]:
    """Returns the names of the blocks and the scales of a stacked tensor."""
    return stack + BLOCKS, stack + SCALES


def packed_shapes(place: StackedTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the shapes of the blocks and the scales of a stacked tensor; None where it cannot be packed."""
    if len(place.shape) != 3 or place.shape[1] % MXFP4_BLOCK:
        return None
    experts, columns, rows = place.shape
    grid = (experts, rows, columns // MXFP4_BLOCK)
    return (*grid, MXFP4_BLOCK // 2), grid


def packed_box(place: StackedTensor, box: Box) -> Box:
    """Returns the box of the packed blocks with a box of an expert's matrix: columns 40:70 are in blocks 1:3."""
    rows, (left, right) = box
    return (place.index, place.index + 1), rows, (left // MXFP4_BLOCK, -(-right // MXFP4_BLOCK))


def unpack(blocks: Tensor, scales: Tensor, box: Box) -> Tensor:
    """Dequantizes a box of an expert's matrix to bfloat16 from the blocks of `packed_box`; ValueError for a NaN."""
    if (scales == _NOT_A_NUMBER).any():
        raise ValueError("a scale is not a number")
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    bytes_ = blocks[0].int()
    # Bit 3 is the sign, so the 16 values by their bits are _VALUES and then their negatives.
    elements = torch.stack([values[bytes_ & 15], values[bytes_ >> 4]], dim=-1).flatten(-2)  # (rows, n, 32)
    # Exact: an element has two significant bits, and a power of two only shifts its exponent.
    whole = torch.ldexp(elements, scales[0, ..., None].int() - _BIAS).flatten(-2)
    left, right = box[1]
    first = left // MXFP4_BLOCK * MXFP4_BLOCK
    return whole[:, left - first : right - first]
