"""Directories in the format of gpt-oss's MXFP4 checkpoints, dequantized by `transformers`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from verl_mg.models.hf_config import SINGLE

STACKS = ("gate_up_proj", "down_proj")


def quantize_directory(folder: Path) -> None:
    """Replaces the matrices of experts by random blocks and scales, and names the format in config.json."""
    tensors, generator = load_file(folder / SINGLE), torch.Generator().manual_seed(5)
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(STACKS):
            stored[name] = tensor.bfloat16()
            continue
        experts, columns, rows = tensor.shape
        grid = (experts, rows, columns // 32)
        stored[f"{name}_blocks"] = torch.randint(256, (*grid, 16), generator=generator, dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(121, 126, grid, generator=generator, dtype=torch.uint8)
    save_file(stored, folder / SINGLE, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))


def dequantized_by_transformers(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of the unquantized format, as `transformers` computes them in bfloat16."""
    stored = load_file(folder / SINGLE)
    result = {name: tensor for name, tensor in stored.items() if not name.endswith(("_blocks", "_scales"))}
    for name in stored:
        if name.endswith("_blocks"):
            stack = name.removesuffix("_blocks")
            result[stack] = convert_moe_packed_tensors(stored[name], stored[f"{stack}_scales"])
    return result
