"""What megatron-core's configuration depends on beside the model and the layout."""

import sys

import torch

from tests.tiny_models import tiny_model
from verl_mg.layout import Layout
from verl_mg.megatron.transformer_config import has_gradient_accumulation_kernel, transformer_config
from verl_mg.models.hf_config import read_config

KERNEL = "fused_weight_gradient_mlp_cuda"


def test_gradient_accumulation_kernel_needs_apex_and_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, KERNEL, None)  # cannot be imported
    assert not has_gradient_accumulation_kernel()
    monkeypatch.delitem(sys.modules, KERNEL)
    (tmp_path / f"{KERNEL}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert has_gradient_accumulation_kernel()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not has_gradient_accumulation_kernel()
    monkeypatch.delitem(sys.modules, KERNEL)


def test_transformer_config_on_cpu_leaves_accumulation_to_autograd(tmp_path):
    config = read_config(tiny_model(tmp_path / "m", "qwen3"))
    assert not transformer_config(config, Layout(), torch.float32, recompute=False).gradient_accumulation_fusion
