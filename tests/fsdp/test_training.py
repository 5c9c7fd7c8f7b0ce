"""Training on sharded modules of `transformers`, against the same modules whole, row by row, in plain torch."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.fsdp.training import gathers, train
from tests.helpers.tiny_models import nightly, oracle, random_rows, rows_for
from tests.megatron.layout_models import make_model
from tests.megatron.training import assert_equal, train_in_plain_torch
from verl_mg.config import FsdpConfig
from verl_mg.layout import Layout
from verl_mg.models.shrunk_config import shrink

LAYOUTS = [
    ("dense", "cp2-dp2", 1, True),
    ("mixture", "dp4", 2, False),
    ("mixture", "tp2-dp2", 1, False),
    ("capped", "cp2-dp2", 1, False),
    ("sinks", "cp2-dp2", 1, False),
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
    ("linear", "dp2", 1, True),
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


def test_layers_are_gathered_again_for_the_backward_pass_where_they_are_freed(ranks, expected):
    model, rows, _ = expected("mixture")
    freed, kept = (
        ranks.run(2, gathers, model, "dp2", rows, FsdpConfig(reshard_after_forward=freed)) for freed in (True, False)
    )
    assert [count - LAYERS for count in freed] == kept and min(kept) > LAYERS


HYBRID = {"num_hidden_layers": 4}
FAMILIES = {
    "nemotron_h": {},
    "kimi_linear": {},
    "lfm2": HYBRID | {"layer_types": ["conv", "full_attention"] * 2},
    "jamba": {"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2},
    "falcon_h1": {},
    "granitemoehybrid": HYBRID | {"layer_types": ["mamba", "attention"] * 2},
    "zamba2": {},
    "phimoe": {},
    "bloom": {},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_family_without_a_table_trains_as_plain_torch(ranks, tmp_path, name):
    """Layers with a state, selected keys, or other attention: rows are packed or not, as the check decides."""
    config = shrink(CONFIG_MAPPING[name](**FAMILIES[name]), 1024).config
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    module.save_pretrained(tmp_path / "model")
    rows = random_rows(9, 60)
    plain = train_in_plain_torch(oracle(tmp_path / "model"), rows, tmp_path)
    trained = {name for name in plain.gradients if name not in plain.idle() or "embed" in name}
    gradients, weights = ({n: x for n, x in of.items() if n in trained} for of in (plain.gradients, plain.weights))
    results = ranks.run(2, train, tmp_path / "model", "dp2", 1, rows, True)
    for result in results:
        result.weights[:] = [part for part in result.weights if part[0] in trained]
    assert_equal(results, replace(plain, gradients=gradients, weights=weights), 2e-5)
