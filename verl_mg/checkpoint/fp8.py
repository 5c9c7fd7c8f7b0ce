"""FP8 tensors of model directories: their scales, and dequantization of single boxes.

    ...up_proj.weight             float8_e4m3fn (rows, columns)
    ...up_proj.weight_scale_inv   (ceil(rows / 128), ceil(columns / 128)): factor of each block, as DeepSeek-V3 has them
    ...up_proj.weight_scale       (), (1,), (rows,) or (rows, 1): factor of the tensor or of each row

The product is computed in float32, as `transformers` does (`Fp8Dequantize` in integrations/finegrained_fp8.py). Blocks
have the size in config.json, and the last ones may be incomplete, as in DeepSeek-V3's projection to 576 rows;
`transformers` 5.19 derives the size from the shapes, and refuses these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container
from pathlib import Path

import torch
from torch import Tensor

from verl_mg.checkpoint.safetensors_file import DTYPE_NAMES
from verl_mg.errors import UserError
from verl_mg.sharding.boxes import BlockSize, Box, scale_grid

FP8 = DTYPE_NAMES[torch.float8_e4m3fn]  # name of the dtype of FP8 tensors in safetensors files
SCALE_DTYPES = tuple(
    DTYPE_NAMES[dtype] for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
)
"""Names of the dtypes of scales."""
_SUFFIXES = ("_scale_inv", "_scale")


def scale_name(tensor: str, names: Container[str]) -> str | None:
    """Returns the name of the scales of a tensor; None where there are none."""
    return next((tensor + suffix for suffix in _SUFFIXES if tensor + suffix in names), None)


def declared_block(folder: Path) -> BlockSize | None:
    """Returns the size of the blocks in the quantization_config of config.json; None where it names none."""
    path = folder / "config.json"
    try:
        block = json.loads(path.read_text(encoding="utf-8"))["quantization_config"]["weight_block_size"]
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
    """Multiplies a box of an FP8 tensor by the scales of its blocks; returns float32 (rows, columns).

    `scales` are of the whole tensor. ValueError where a scale of the box is negative or not finite.
    """
    (top, bottom), (left, right) = box
    height, width = block
    first, last = left // width, -(-right // width)
    grid = scales if scales.dim() == 2 else scales.reshape(-1, 1)
    needed = grid[top // height : -(-bottom // height), first:last].float()
    if not (needed.isfinite() & (needed >= 0)).all():
        raise ValueError("a scale is negative or not finite")
    columns = torch.arange(left, right) // width - first
    result = values.float()
    for number, factors in enumerate(needed, top // height):
        # In place, block row by block row: the factors of all elements would be as large as the box.
        rows = slice(max(number * height - top, 0), (number + 1) * height - top)
        result[rows] *= factors[columns]
    return result
