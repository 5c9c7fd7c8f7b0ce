"""The CPU platform leaves everything alone that is not megatron's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import verl_mg.megatron  # noqa: F401
from tests.helpers.tiny_models import tiny_model
from verl_mg.megatron.cpu_shim import tensor_types_named_cuda

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the CPU platform is never installed")


def test_factories_replace_only_cuda_by_cpu():
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.tensor([1], device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.empty(2, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.tensor([]).device.type == torch.arange(3).device.type == torch.empty(1).device.type == "meta"
    assert torch.ones(2).cuda().device.type == "cpu"


def test_cpu_shim_transformers_loads_models_unchanged(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "m", "qwen3"))
    expected = 1.0 / 10000 ** (torch.arange(0, 12, 2) / 12)
    assert torch.allclose(model.model.rotary_emb.inv_freq, expected)


def test_tensor_types_named_cuda_applies_only_inside():
    with tensor_types_named_cuda():
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1).type(torch.int64).dtype is torch.int64
    assert torch.zeros(1).type() == "torch.FloatTensor"


@pytest.mark.nightly
def test_torch_compile_imported_after_the_cpu_platform_compiles():
    compiled = "torch.compile(torch.tanh, backend='eager')(torch.ones(1))"
    program = f"import verl_mg.megatron, torch; print({compiled} > 0)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "tensor([True])\n", done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("package", ["transformer_engine", "flash_mla"])
def test_package_for_gpus_that_finds_no_driver_is_not_imported(tmp_path, package):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", "import verl_mg.megatron"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
