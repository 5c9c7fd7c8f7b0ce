"""Training on the devices: outputs, gradients and two steps under every kind of layout, against `transformers`."""

from pathlib import Path

import pytest
import torch

from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_models import random_rows
from tests.megatron.training import Trained, assert_equal, assert_near, train
from verl_mg.config import MegatronConfig
from verl_mg.layout import Layout
from verl_mg.models.hf_config import read_config

ROWS = 12
# (model, layout, recomputation); first those of one and two ranks.
CASES = [
    ("dense", "tp1", False),
    ("mixture", "tp1", True),
    ("latent", "tp1", False),
    ("capped", "tp1", False),
    ("dense", "tp2", False),
    ("dense", "cp2", True),
    ("dense", "pp2-vpp3", False),
    ("mixture", "ep2", False),
    ("mixture", "tp2-ep2-etp1", False),
    ("latent", "cp2", False),
    ("latent", "tp2-ep2-etp1", True),
    ("tied", "tp2-pp2", False),
    ("capped", "tp2-pp2-vpp2", False),
    ("mixture", "tp2-ep1-etp2", False),
    ("dense", "tp2-cp2-pp2-vpp3", True),
    ("dense", "cp8", False),
    ("tied", "pp8", False),
    ("mixture", "tp2-pp2-vpp2-ep2", True),
    ("mixture", "tp4-ep2-etp2", False),
    ("latent", "tp2-cp2-pp2-vpp2-ep2-etp1", True),
]
HALF_CASES = [
    ("dense", "tp1"),
    ("mixture", "tp1"),
    ("latent", "tp1"),
    ("dense", "tp2-cp2"),
    ("mixture", "tp2-ep2-etp1"),
    ("latent", "pp2-ep2"),
]
WITH_TRANSFORMER_ENGINE = [
    *((name, layout, "a2a") for name, layout in HALF_CASES),
    ("dense", "tp2-cp2", "p2p"),
    ("dense", "tp2-cp2", "all_gather"),
    ("latent", "cp2", "p2p"),
]


def trained_on_all(ranks: RankPool, model: Path, layout: str, *options: object) -> list[Trained]:
    """On as many ranks as the layout can use."""
    smallest = Layout.parse(layout).ranks
    count = max(ranks.size // smallest, 1) * smallest
    return ranks.run(count, train, model, layout, random_rows(ROWS, read_config(model).vocab), *options)


@pytest.mark.parametrize(("name", "layout", "recompute"), CASES)
def test_train_in_float32_on_devices_equals_transformers(ranks, models, expected, name, layout, recompute):
    results = trained_on_all(ranks, models[name], layout, recompute)
    assert_equal(results, expected(models[name]), 1e-4)


@pytest.mark.parametrize(("name", "layout"), HALF_CASES)
def test_train_in_bfloat16_on_devices_is_near_transformers(ranks, models, expected, name, layout):
    model = models[f"half {name}"]
    options = (False, "language", 1, torch.bfloat16)
    assert_near(trained_on_all(ranks, model, layout, *options), expected(model))


@pytest.mark.needs(te=True)
@pytest.mark.parametrize(("name", "layout", "exchange"), WITH_TRANSFORMER_ENGINE)
def test_train_with_transformer_engine_on_devices_is_near_transformers(ranks, models, expected, name, layout, exchange):
    model, fields = models[f"half {name}"], MegatronConfig(transformer={"cp_comm_type": exchange})
    options = (False, "language", 1, torch.bfloat16, fields, "transformer_engine")
    assert_near(trained_on_all(ranks, model, layout, *options), expected(model))
