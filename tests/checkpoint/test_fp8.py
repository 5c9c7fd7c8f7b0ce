"""FP8 checkpoints, dequantized while boxes are read."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.quantized_directories import (
    changed,
    dequantized_by_transformers,
    different_boxes,
    quantize_directory,
)
from tests.helpers.tiny_models import tiny_model
from tests.oracles.installed_source import installed_functions
from verl_mg.checkpoint.hf_safetensors import CheckpointReader
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.checkpoint.quantized import dequantize
from verl_mg.errors import UserError
from verl_mg.models.hf_config import SINGLE, read_config
from verl_mg.sharding.boxes import Shard, scale_grid, slices
from verl_mg.sharding.weight_table import weight_table

BLOCK = (4, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_model(tmp_path_factory.mktemp("fp8"), "deepseek_v3")
    quantize_directory(folder, BLOCK)
    return folder


@pytest.fixture(scope="module")
def expected(model):
    return dequantized_by_transformers(model, weight_table(read_config(model)), BLOCK)


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        ("tp2-pp2-ep2-etp1", 4),
        pytest.param("tp1", 1, marks=pytest.mark.nightly),
        pytest.param("tp4-etp2-ep2", 4, marks=pytest.mark.nightly),
        pytest.param("pp4", 4, marks=pytest.mark.nightly),
    ],
)
def test_model_runner_fp8_checkpoint_has_the_values_of_transformers(ranks, model, expected, layout, count):
    results = ranks.run(count, different_boxes, model, "megatron", layout, expected)
    assert all(number and not different for number, different in results)


@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (129, 1), (576, 256)])
def test_dequantize_blocks_beyond_the_edge_equal_sglang(shape):
    """DeepSeek-V3's projection to 576 rows ends within a block, which `transformers` refuses."""
    sglang = "srt/layers/quantization/"
    quantize = installed_functions("sglang", sglang + "mxfp8_block_convert.py", "bf16_to_block_fp8_128", torch=torch)
    reverse = installed_functions("sglang", sglang + "fp8_utils.py", "block_quant_dequant", torch=torch)
    torch.manual_seed(1)
    values, scales = quantize["bf16_to_block_fp8_128"](torch.randn(shape).bfloat16())
    whole = reverse["block_quant_dequant"](values, scales, [128, 128], torch.bfloat16)
    assert scales.shape == scale_grid(shape, (128, 128))
    for box in (((0, shape[0]), (0, shape[1])), ((100, 129 if shape[0] > 128 else 128), (0, min(shape[1], 150)))):
        part = dequantize(values[slices(box)], scales, box, (128, 128))
        assert torch.equal(part.bfloat16(), whole[slices(box)])


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([0.25]), torch.arange(1.0, 7), torch.rand(6, 1)])
def test_checkpoint_reader_scales_of_tensor_and_rows_are_factors(tmp_path, scale):
    values = torch.randn(6, 4).to(torch.float8_e4m3fn)
    save_file({"a.weight": values, "a.weight_scale": scale.bfloat16()}, tmp_path / SINGLE)
    box = ((2, 5), (1, 4))
    reader = CheckpointReader(ModelDirectory.find(tmp_path))
    read = reader.read("a.weight", box)
    factors = scale.bfloat16().float().reshape(-1, 1).expand(6, 1) if scale.numel() > 1 else scale.reshape(1, 1)
    assert torch.equal(read, (values.float() * factors)[slices(box)])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_checkpoint_reader_mxfp8_equals_sglang(tmp_path, dtype):
    """Nothing but the size of blocks in config.json says that bytes are exponents."""
    file = "srt/layers/quantization/mxfp8_block_convert.py"
    names = ("_ue8m0_to_fp32", "dequant_mxfp8_2d_to_bf16")
    sglang = installed_functions("sglang", file, *names, torch=torch, MXFP8_BLOCK_SIZE=32)
    values, scales = torch.randn(300, 96).to(torch.float8_e4m3fn), torch.randint(60, 200, (300, 3), dtype=torch.uint8)
    save_file({"a.weight": values, "a.weight_scale_inv": scales.view(dtype)}, tmp_path / SINGLE)
    config, box = tmp_path / "config.json", ((2, 299), (40, 90))
    config.write_text(json.dumps({"quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]}}))
    directory = ModelDirectory.find(tmp_path)
    directory.check({"a.weight": Shard((300, 96), ())})
    read = CheckpointReader(directory).read("a.weight", box)
    assert torch.equal(read.bfloat16(), sglang["dequant_mxfp8_2d_to_bf16"](values, scales)[slices(box)])


def with_value(value):
    def change(scales):
        scales[0, 0] = value
        return scales

    return change


def test_model_directory_damaged_scales_are_named_with_file_and_tensor(model, tmp_path):
    name = "model.layers.1.self_attn.o_proj.weight"
    whole = weight_table(read_config(model)).huggingface()

    def damaged(change):
        return ModelDirectory.find(changed(model, tmp_path / "damaged", {f"{name}_scale_inv": change}))

    with pytest.raises(UserError, match=rf"{SINGLE}: tensor '{name}' is F8_E4M3, but the directory has no scales"):
        damaged(None).check(whole)
    with pytest.raises(UserError, match=rf"{SINGLE}: the scales '{name}_scale_inv' .*\(7, 8\), which does not fit"):
        damaged(lambda scales: scales[1:]).check(whole)
    with pytest.raises(UserError, match=rf"{SINGLE}: the scales .* of '{name}' cannot be used \(they are I32\)"):
        damaged(lambda scales: scales.int()).check(whole)
    with pytest.raises(UserError, match=rf"{SINGLE}: the scales .* of '{name}' cannot be used \(they are U8\)"):
        damaged(lambda scales: scales.to(torch.uint8)).check(whole)  # exponents in MXFP8 only
    for value in (torch.nan, torch.inf, -1.0):
        directory = damaged(with_value(value))
        directory.check(whole)
        reader = CheckpointReader(directory)
        reader.read(name, ((4, 8), (0, 8)))  # other blocks
        with pytest.raises(UserError, match=rf"{SINGLE}: the scales .* of '{name}' .*negative or not finite in"):
            reader.read(name, ((2, 8), (0, 8)))


def test_model_directory_damaged_block_size_is_user_error(model, tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / SINGLE)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [0, 128]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"weight_block_size is \[0, 128\], not two sizes"):
        ModelDirectory.find(tmp_path)


def test_model_directory_unpacked_has_the_size_of_blocks(model):
    found = ModelDirectory.find(model)
    assert ModelDirectory.unpacked(model, found.packed()).block == found.block == BLOCK
