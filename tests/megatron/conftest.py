"""Tiny models of a test session, each made when it is first read."""

from dataclasses import replace

import pytest

from tests.helpers.tiny_models import VARIANTS, tiny_model
from tests.megatron.layout_models import LOW_RANK_QUERIES, ModelFolders
from verl_mg.models.hf_config import read_config

CHANGED = {"unnormalized": ("qwen3_moe", {"norm_topk_prob": False})}  # {name: (architecture, fields of config.json)}


@pytest.fixture(scope="session")
def families(tmp_path_factory) -> ModelFolders:
    """Models of two layers by their architectures, or names in CHANGED; tests do not change them."""

    def make(folder, name):
        architecture, fields = CHANGED.get(name, (name, {}))
        return tiny_model(folder, architecture, layers=2, **fields)

    return ModelFolders(tmp_path_factory.mktemp("families"), make)


@pytest.fixture(scope="session")
def configs(tmp_path_factory):
    """Configurations of models of four layers by their architectures."""
    folder = tmp_path_factory.mktemp("configs")
    configs = {name: read_config(tiny_model(folder / name, name)) for name in VARIANTS}
    plain = configs["deepseek_v2"]
    return configs | {LOW_RANK_QUERIES: replace(plain, latent=replace(plain.latent, q_rank=12))}


@pytest.fixture(scope="session")
def layout_models(tmp_path_factory) -> ModelFolders:
    """The models of MODELS by their names there."""
    return ModelFolders(tmp_path_factory.mktemp("layouts"))
