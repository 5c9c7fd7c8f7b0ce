"""What megatron-core's configuration depends on beside the model and the layout, and which kernels a job uses."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.random_models import config
from verl_mg.errors import UserError
from verl_mg.layout import Layout
from verl_mg.megatron.transformer_config import resolve_kernels, token_multiple, transformer_config
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
def test_transformer_config_of_a_pipeline_frees_sent_outputs_without_waiting_for_the_device(configs, layout):
    built = transformer_config(configs["qwen3"], Layout.parse(layout), ModelSpec(Path(), torch.float32))
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
    ("gpu", "installed", "setting", "dtype", "expected"),
    [
        (True, True, "auto", torch.bfloat16, "transformer_engine"),
        (True, True, "auto", torch.float32, "torch"),
        (True, False, "auto", torch.bfloat16, "torch"),
        (False, True, "auto", torch.bfloat16, "torch"),
        *((True, True, kernels, torch.bfloat16, kernels) for kernels in ("torch", "transformer_engine")),
        (True, True, "torch", torch.float32, "torch"),
    ],
)
def test_kernels_are_requested_or_with_auto_transformer_engines_for_bfloat16_on_gpus(
    machine, gpu, installed, setting, dtype, expected
):
    machine(gpu, installed)
    assert resolve_kernels(setting, dtype) == expected


@pytest.mark.parametrize(
    ("gpu", "message"),
    [(False, "needs a GPU.* Set model.kernels="), (True, "cannot be imported. Install launch/")],
)
def test_transformer_engine_where_it_cannot_run_is_refused_with_the_reason(machine, gpu, message):
    machine(gpu, False)
    with pytest.raises(UserError, match=rf"^model.kernels: Transformer Engine {message}"):
        resolve_kernels("transformer_engine", torch.bfloat16)


def test_transformer_engine_in_float32_is_refused(machine):
    """Its products would be TensorFloat-32."""
    machine(True, True)
    with pytest.raises(
        UserError, match=r"^model.kernels: .* float32 .* 10 bits .* Set model.kernels=auto or torch, or"
    ):
        resolve_kernels("transformer_engine", torch.float32)


@pytest.mark.parametrize(
    ("family", "words"), [("gpt_oss", "no attention sinks"), ("deepseek_v32", "no sparse attention here, which")]
)
def test_families_without_modules_of_transformer_engine_have_kernels_of_torch(machine, family, words):
    machine(True, True)
    model = config(family)
    assert resolve_kernels("auto", torch.bfloat16, model) == "torch"
    with pytest.raises(UserError, match=rf"^model.kernels: .* {words} .*{family} needs. Set model.kernels="):
        resolve_kernels("transformer_engine", torch.bfloat16, model)
