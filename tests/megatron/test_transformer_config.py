"""What megatron-core's configuration depends on beside the model and the layout, and which kernels a job uses."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.random_models import config
from tests.helpers.tiny_models import tiny_model
from verl_mg.errors import UserError
from verl_mg.layout import Layout
from verl_mg.megatron.transformer_config import resolve_kernels, token_multiple, transformer_config
from verl_mg.models.hf_config import read_config
from verl_mg.training.model_spec import ModelSpec


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32),
        ({}, 1),
    ],
)
def test_token_multiple_is_that_of_the_products(fields, expected):
    config = SimpleNamespace(**{"fp8": None, "fp8_recipe": "delayed", "fp4": None, "fp4_recipe": "nvfp4"} | fields)
    assert token_multiple(config) == expected


@pytest.mark.parametrize("layout", ["tp1", "pp2", "pp2-vpp2"])
def test_transformer_config_of_a_pipeline_frees_sent_outputs_without_waiting_for_the_device(tmp_path, layout):
    config = read_config(tiny_model(tmp_path / "m", "qwen3"))
    built = transformer_config(config, Layout.parse(layout), ModelSpec(Path(), torch.float32))
    assert built.deallocate_pipeline_outputs == (layout != "tp1")
    assert not built.batch_p2p_sync


@pytest.fixture
def machine(monkeypatch):
    """Sets whether the machine has a GPU and Transformer Engine."""

    def choose(gpu, installed):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr("verl_mg.megatron.transformer_config.HAVE_TE", installed)

    return choose


@pytest.mark.parametrize(
    ("gpu", "installed", "dtype", "expected"),
    [
        (True, True, torch.bfloat16, "transformer_engine"),
        (True, True, torch.float32, "torch"),
        (True, False, torch.bfloat16, "torch"),
        (False, True, torch.bfloat16, "torch"),
    ],
)
def test_auto_takes_transformer_engine_for_bfloat16_on_gpus(machine, gpu, installed, dtype, expected):
    machine(gpu, installed)
    assert resolve_kernels("auto", dtype) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("setting", ["torch", "transformer_engine"])
def test_requested_kernels_are_those_of_the_job(machine, setting, dtype):
    machine(True, True)
    assert resolve_kernels(setting, dtype) == setting


def test_transformer_engine_where_it_cannot_run_is_refused_with_the_reason():
    with pytest.raises(UserError, match=r"^model.kernels: Transformer Engine needs a GPU.* Set model.kernels="):
        resolve_kernels("transformer_engine", torch.bfloat16)


def test_transformer_engine_that_is_not_installed_is_refused_with_the_remedy(machine):
    machine(True, False)
    with pytest.raises(UserError, match=r"^model.kernels: Transformer Engine cannot be imported. Install launch/"):
        resolve_kernels("transformer_engine", torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "words"), [("gpt_oss", "no attention sinks"), ("deepseek_v32", "no sparse attention here, which")]
)
def test_families_without_modules_of_transformer_engine_have_kernels_of_torch(machine, family, words):
    machine(True, True)
    model = config(family)
    assert resolve_kernels("auto", torch.bfloat16, model) == "torch"
    with pytest.raises(UserError, match=rf"^model.kernels: .* {words} .*{family} needs. Set model.kernels="):
        resolve_kernels("transformer_engine", torch.bfloat16, model)
