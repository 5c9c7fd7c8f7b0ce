"""MXFP4 tensors of model directories: their names and shapes, and dequantization of single boxes.

    ...experts.gate_up_proj_blocks   uint8 (experts, rows, columns / 32, 16): two elements a byte, the lower half first
    ...experts.gate_up_proj_scales   uint8 (experts, rows, columns / 32): exponent of two of each block, plus 127

gpt-oss's checkpoints have them in place of `...experts.gate_up_proj`, whose matrices are the transposed ones. An
element is E2M1 (OCP Microscaling Formats, version 1.0, section 5.3.3), its product with the scale exact in bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_mg.models.checkpoint_shapes import BLOCKS, SCALES
from verl_mg.models.stacked_tensors import StackedTensor
from verl_mg.sharding.boxes import Box

BLOCK = 32  # elements of a row that have a common scale
_BIAS, _NOT_A_NUMBER = 127, 255  # of E8M0, the format of scales
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def packed_names(stack: str) -> tuple[str, str]:
    """Returns the names of the blocks and the scales of a stacked tensor."""
    return stack + BLOCKS, stack + SCALES


def packed_shapes(place: StackedTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the shapes of the blocks and the scales of a stacked tensor; None where it cannot be packed."""
    if len(place.shape) != 3 or place.shape[1] % BLOCK:
        return None
    experts, columns, rows = place.shape
    grid = (experts, rows, columns // BLOCK)
    return (*grid, BLOCK // 2), grid


def packed_box(place: StackedTensor, box: Box) -> Box:
    """Returns the box of the blocks, and of the scales, that contains a box of an expert's matrix.

    Columns 40:70 of expert 3 are in blocks 1:3 of it.
    """
    rows, (left, right) = box
    return (place.index, place.index + 1), rows, (left // BLOCK, -(-right // BLOCK))


def dequantize(blocks: Tensor, scales: Tensor, box: Box) -> Tensor:
    """Dequantizes a box of an expert's matrix to bfloat16 (rows, columns); ValueError for a scale that is no number.

    blocks (1, rows, n, 16) and scales (1, rows, n) uint8 are of `packed_box`, which may begin before the box.
    """
    if (scales == _NOT_A_NUMBER).any():
        raise ValueError("a scale is not a number")
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    bytes_ = blocks[0].int()
    # Bit 3 is the sign, so the 16 values by their bits are _VALUES and then their negatives.
    elements = torch.stack([values[bytes_ & 15], values[bytes_ >> 4]], dim=-1).flatten(-2)  # (rows, n, 32)
    # Exact: an element has two significant bits, and a power of two only shifts its exponent.
    whole = torch.ldexp(elements, scales[0, ..., None].int() - _BIAS).flatten(-2)
    left, right = box[1]
    first = left // BLOCK * BLOCK
    return whole[:, left - first : right - first]
