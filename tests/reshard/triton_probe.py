"""What SGLang's Triton kernels make of a matrix in MXFP8: `python -m tests.reshard.triton_probe`, with one JSON.

Triton interprets them: TRITON_INTERPRET=1. Its interpreter casts to FP8 without the carry into the exponent, so the
quotients are returned in float32.
"""

import importlib.util
import json
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from tests.oracles.installed_source import folder_of_package
from tests.reshard.encoded_moves import many_magnitudes

FOLDER = "kernels/ops/quantization"
BLOCK = 32
MATRIX = many_magnitudes()
ROWS, COLUMNS = MATRIX.shape


def kernels(file: str) -> ModuleType:
    """A file of SGLang, without the package."""
    folder = folder_of_package("sglang")
    assert folder
    spec = importlib.util.spec_from_file_location(file.removesuffix(".py"), folder / FOLDER / file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def swizzled_scales() -> Tensor:
    """Of the kernel that SGLang keeps equal to FlashInfer's, in the order of the rows."""
    module: Any = kernels("mxfp8_swizzled_triton.py")
    across = COLUMNS // BLOCK
    tiles, grid = triton.cdiv(across, 4), (triton.cdiv(ROWS, 32), triton.cdiv(across, 8))
    quantized, scales = module._alloc(ROWS, COLUMNS, MATRIX.device)
    sizes = (ROWS, COLUMNS, across, tiles, MATRIX.stride(0))
    module._mxfp8_quant_kernel[grid](MATRIX, quantized, scales, *sizes, BLOCK_R=32, G=8)
    rows = triton.cdiv(ROWS, 128)
    return scales.view(rows, tiles, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(rows * 128, tiles * 4)[:ROWS, :across]


def quotients() -> tuple[Tensor, Tensor]:
    """Of the kernel for keys and values: values over scales, float32, and the scales."""
    module: Any = kernels("mxfp8_quant.py")
    result, scales = torch.empty(MATRIX.shape), torch.empty(ROWS, COLUMNS // BLOCK, dtype=torch.uint8)
    strides = (*MATRIX.stride(), *result.stride(), *scales.stride())
    grid = (triton.cdiv(ROWS, 64), COLUMNS // BLOCK)
    module._mxfp8_quant_kernel[grid](MATRIX, result, scales, ROWS, COLUMNS, *strides, BLOCK_M=64)
    return result, scales


if __name__ == "__main__":
    divided, of_cache = quotients()
    print(json.dumps([swizzled_scales().tolist(), of_cache.tolist(), divided.tolist()]))
