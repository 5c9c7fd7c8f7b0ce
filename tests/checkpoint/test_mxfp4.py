"""MXFP4 checkpoints, dequantized while boxes are read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.checkpoint.quantized_directories import changed, different_boxes
from tests.helpers.tiny_models import tiny_model, unstacked
from verl_mg.checkpoint.hf_safetensors import CheckpointReader
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.errors import UserError
from verl_mg.models.hf_config import SINGLE, read_config
from verl_mg.sharding.boxes import slices
from verl_mg.sharding.weight_table import weight_table

STACK = "model.layers.1.mlp.experts.gate_up_proj"
EXPERT = "model.layers.1.mlp.experts.2.gate_up_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_model(tmp_path_factory.mktemp("mxfp4"), "gpt_oss", layers=2, ffn=64)
    quantize_directory(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model):
    return unstacked(dequantized_by_transformers(model))


@pytest.mark.parametrize(
    ("backend", "layout", "count"),
    [
        ("megatron", "tp2-pp2-ep2-etp1", 4),
        pytest.param("megatron", "tp1", 1, marks=pytest.mark.nightly),
        pytest.param("megatron", "tp2", 2, marks=pytest.mark.nightly),
        ("fsdp", "dp2", 2),
    ],
)
def test_runner_mxfp4_checkpoint_has_the_values_of_transformers(ranks, model, expected, backend, layout, count):
    assert expected[EXPERT].unique().numel() > 20
    results = ranks.run(count, different_boxes, model, backend, layout, expected)
    assert all(number and not different for number, different in results)


def test_mxfp4_oracle_is_what_from_pretrained_loads(model):
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    assert torch.equal(module.state_dict()[STACK], dequantized_by_transformers(model)[STACK])


def directory(folder):
    return ModelDirectory.find(folder, weight_table(read_config(folder)).tensor_index.stacked)


@pytest.mark.parametrize("box", [((0, 128), (0, 32)), ((5, 9), (7, 30)), ((127, 128), (31, 32))])
def test_checkpoint_reader_reads_boxes_within_and_across_blocks(model, expected, box):
    reader = CheckpointReader(directory(model))
    assert torch.equal(reader.read(EXPERT, box), expected[EXPERT][slices(box)])


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("blocks", lambda t: t.int(), r"gate_up_proj_blocks' is I32, but MXFP4 is stored as U8"),
        ("blocks", lambda t: t[:, :-1], r"gate_up_proj_blocks' has shape \(4, 127, 1, 16\), but \(4, 128, 1, 16\)"),
        ("scales", lambda t: t[:3], r"gate_up_proj_scales' has shape \(3, 128, 1\), but \(4, 128, 1\)"),
    ],
)
def test_model_directory_damaged_mxfp4_tensor_is_named(model, tmp_path, part, change, message):
    folder = changed(model, tmp_path / "damaged", {f"{STACK}_{part}": change})
    with pytest.raises(UserError, match=rf"{SINGLE}: tensor '.*{message}"):
        directory(folder).check(weight_table(read_config(folder)).huggingface())


def test_checkpoint_reader_scale_that_is_no_number_is_named(model, tmp_path):
    def without_number(scales):
        scales[2, 6] = 255
        return scales

    folder = changed(model, tmp_path / "damaged", {f"{STACK}_scales": without_number})
    reader = CheckpointReader(directory(folder))
    reader.read(EXPERT, ((0, 6), (0, 32)))
    with pytest.raises(UserError, match=rf"scales '{STACK}_scales' .* \(a scale is not a number in the box"):
        reader.read(EXPERT, ((0, 7), (0, 32)))


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
