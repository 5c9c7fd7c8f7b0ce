"""Directories in the format of DeepSeek-V3's FP8 checkpoints, quantized by `transformers`."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from verl_mg.models.hf_config import SINGLE
from verl_mg.sharding.boxes import slices
from verl_mg.sharding.weight_table import WeightTable


def quantize_directory(folder: Path, block: tuple[int, int]) -> None:
    """Replaces the weights of linear layers by FP8 and scales of blocks, and names the blocks in config.json."""
    tensors = load_file(folder / SINGLE)
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=block)))
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        linear = "_proj" in name and tensor.dim() == 2
        stored |= quantizer._quantize_one(name, tensor.bfloat16()) if linear else {name: tensor.bfloat16()}
        assert not linear or stored[name].dtype is torch.float8_e4m3fn, f"{name} has an incomplete block"
    save_file(stored, folder / SINGLE, {"format": "pt"})
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


def dequantized_by_transformers(folder: Path, table: WeightTable, block: tuple[int, int]) -> dict[str, Tensor]:
    """Returns the tensors of the checkpoint as `transformers` dequantizes them to bfloat16."""
    quantization = FineGrainedFP8Config(weight_block_size=block, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=quantization)
    state, tensors = model.state_dict(), {}
    for name, shard in table.transformers().items():
        for piece in shard.pieces:
            tensors[piece.tensor] = state[name][slices(piece.target)].reshape(
                table.tensor_index.tensors[piece.tensor].shape
            )
    return tensors
