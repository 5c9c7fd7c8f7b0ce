"""Quantized directories: in the format of DeepSeek-V3's FP8 checkpoints, by `transformers`; damaged; and as loaded."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.fsdp.model_runner import FsdpRunner
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import SINGLE
from verl_mg.sharding.boxes import slices
from verl_mg.sharding.weight_table import WeightTable
from verl_mg.training.model_spec import ModelSpec


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


def changed(model: Path, folder: Path, changes: Mapping[str, Callable[[Tensor], Tensor] | None]) -> Path:
    """Copies a model with other tensors; None: without them."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tensors = load_file(folder / SINGLE)
    for name, change in changes.items():
        tensor = tensors.pop(name)
        tensors |= {name: change(tensor).contiguous()} if change else {}
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    return folder


def different_boxes(model: Path, backend: str, layout: str, expected: Mapping[str, Tensor]) -> tuple[int, list[str]]:
    """Loads a model on these ranks; returns how many boxes this rank has, and the tensors that differ."""
    placement = Placement.on(Layout.parse(layout), dist.get_world_size())
    if backend == "fsdp":
        runner = FsdpRunner(ModelSpec(model, torch.bfloat16, trained=False), MeshGroups(placement))
    else:
        runner = MegatronRunner(ModelSpec(model, torch.bfloat16), ParallelGroups(placement))
    parameters = runner.parameters()
    pieces = [(name, p) for name, shard in runner.shard_map().shards(dist.get_rank()).items() for p in shard.pieces]
    different = []
    for name, piece in pieces:
        values = parameters[name].detach()[slices(piece.target)]
        whole = expected[piece.tensor].to(values.dtype)
        if not torch.equal(values, whole[slices(piece.source)].view(values.shape)):
            different.append(piece.tensor)
    return len(pieces), different
