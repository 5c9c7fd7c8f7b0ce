"""Each family through actors of two layouts: the directory that the second one writes is bitwise the first one's."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.roles import build_role
from tests.helpers.tiny_models import VARIANTS, tiny_model, tiny_model_with_multi_token_layer
from verl_mg.config import OptimizerConfig
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.roles.models import Actor

WEIGHTS = "model.safetensors"
PUBLISHED = {"moonlight": ("deepseek_v3", 0), "kimi_k2": ("kimi_k2", 12)}
"""Directories with DeepSeek-V3's tensors: their `model_type`, and the rank of their queries."""
FLOAT32 = ("e_score_correction_bias", "indexer.k_norm.weight", "indexer.k_norm.bias")
"""Ends of the names of the tensors that are published in float32."""
WITH_MULTI_TOKEN_LAYER = ("deepseek_v3", "glm4_moe")
DAILY = "glm4_moe with MTP"
FAMILIES = [*VARIANTS, *PUBLISHED, *(f"{name} with MTP" for name in WITH_MULTI_TOKEN_LAYER)]


def directory(folder: Path, family: str) -> Path:
    """A tiny model in bfloat16 with router biases and norms of indexers in float32, as they are published."""
    name, _, multi_token = family.partition(" with ")
    if multi_token:
        model = tiny_model_with_multi_token_layer(folder, name)
    elif name in PUBLISHED:
        model_type, q_rank = PUBLISHED[name]
        options = {"experts": 8, "shared_experts": 2, "dense_layers": 1, "perturb": True}
        model = make_tiny_model(folder, "deepseek_v3", hidden=32, layers=4, q_rank=q_rank, **options)
        config = json.loads((model / "config.json").read_text()) | {"model_type": model_type}
        (model / "config.json").write_text(json.dumps(config))
    else:
        model = tiny_model(folder, name)
    tensors = {
        name: values if name.endswith(FLOAT32) else values.bfloat16()
        for name, values in load_file(model / WEIGHTS).items()
    }
    save_file(tensors, model / WEIGHTS, {"format": "pt"})
    return model


def saved(model: Path, layout: str, folder: Path) -> None:
    actor = build_role(Actor, model, layout, dtype=torch.bfloat16, optimizer=OptimizerConfig())
    actor.save(folder, model)


@pytest.mark.parametrize(
    "family", [DAILY, *(pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES if name != DAILY)]
)
def test_directory_through_two_layouts_is_bitwise_the_same(ranks, tmp_path, family):
    model = directory(tmp_path / "model", family)
    has_experts = read_config(model).experts is not None
    ranks.run(4, saved, model, "tp2-pp2-ep2-etp1" if has_experts else "tp2-pp2", tmp_path / "first")
    ranks.run(4, saved, tmp_path / "first", "cp2-ep4-etp1" if has_experts else "cp2-pp2-vpp2", tmp_path / "second")
    given, first, second = (load_file(folder / WEIGHTS) for folder in (model, tmp_path / "first", tmp_path / "second"))
    for written in (first, second):
        assert written.keys() == given.keys()
        for name, values in given.items():
            assert written[name].dtype == values.dtype, name
            assert torch.equal(written[name].view(torch.uint8), values.view(torch.uint8)), name
    assert all(given[name].std() > 0 for name in given if name.endswith(FLOAT32))
    assert read_config(tmp_path / "second") == read_config(model)
