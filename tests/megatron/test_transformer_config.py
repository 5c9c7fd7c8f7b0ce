"""What megatron-core's configuration depends on beside the model and the layout."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.tiny_models import tiny_model
from verl_mg.layout import Layout
from verl_mg.megatron.transformer_config import token_multiple, transformer_config
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
