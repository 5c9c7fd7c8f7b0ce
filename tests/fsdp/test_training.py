"""Training on sharded modules of `transformers`, against the same modules whole, row by row, in plain torch."""

from functools import cache

import pytest

from tests.fsdp.training import train
from tests.helpers.tiny_models import nightly, oracle, rows_for
from tests.megatron.layout_models import make_model
from tests.megatron.training import assert_equal, train_in_plain_torch
from verl_mg.config import FsdpConfig
from verl_mg.layout import Layout

LAYOUTS = [
    ("dense", "cp2-dp2", 1, True),
    ("mixture", "dp4", 2, False),
    ("mixture", "tp2-dp2", 1, False),
    ("capped", "cp2-dp2", 1, False),
    ("sinks", "cp2-dp2", 1, False),
    ("linear", "dp2", 1, True),
]
NIGHTLY_LAYOUTS = [
    ("dense", "dp2", 1, False),
    ("dense", "dp4", 1, True),
    ("dense", "dp4", 2, False),
    ("dense", "tp2-dp2", 1, False),
    ("dense", "tp2-cp2", 1, False),
    ("mixture", "dp2", 1, False),
    ("mixture", "dp4", 1, True),
    ("mixture", "cp2-dp2", 1, False),
    ("capped", "dp2", 1, False),
    ("capped", "dp4", 2, True),
    ("capped", "tp2-dp2", 1, False),
    ("tied", "tp2-dp2", 1, True),
    ("sinks", "dp2", 1, True),
    ("sinks", "dp4", 2, False),
    ("latent", "dp4", 1, False),
    ("latent", "cp2-dp2", 1, False),
    ("linear", "tp2-dp2", 1, False),
    ("linear dense", "dp4", 2, True),
    ("sparse", "dp2", 1, True),
]
LAYERS = 3
"""Enough for a layer that is neither the first nor the last one: a mesh has no stages."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    @cache
    def of(name):
        folder = tmp_path_factory.mktemp(name)
        model = make_model(folder / "model", name, layers=LAYERS)
        rows = rows_for(model, 16)
        return model, rows, train_in_plain_torch(oracle(model), rows, folder)

    return of


@pytest.mark.parametrize(("name", "layout", "replicas", "recompute"), [*LAYOUTS, *nightly(*NIGHTLY_LAYOUTS)])
def test_update_on_any_mesh_equals_plain_torch(ranks, expected, name, layout, replicas, recompute):
    model, rows, plain = expected(name)
    results = ranks.run(Layout.parse(layout).ranks, train, model, layout, replicas, rows, recompute)
    assert plain.idle() <= {"model.embed_tokens.weight"}
    assert_equal(results, plain, 2e-5)


@pytest.mark.parametrize(
    ("name", "layout", "replicas"),
    [("mixture", "dp2", 1), *nightly(("dense", "dp4", 2), ("dense", "tp2-dp2", 1), ("dense", "cp2-dp2", 1))],
)
def test_update_with_weights_in_host_memory_equals_plain_torch(ranks, expected, name, layout, replicas):
    """torch's policy of offload runs on CPU ranks too: test_offload.py has the devices of its tensors."""
    model, rows, plain = expected(name)
    options = FsdpConfig(cpu_offload=True)
    results = ranks.run(Layout.parse(layout).ranks, train, model, layout, replicas, rows, False, options)
    assert_equal(results, plain, 2e-5)
