"""Every kind of parallelism, alone and together, on eight ranks: all that training computes, against one rank."""

from functools import cache

import pytest
import torch

from tests.helpers.tiny_models import random_rows
from tests.megatron.layout_models import ModelFolders
from tests.megatron.training import assert_equal, one_rank, train
from verl_mg.config import MegatronConfig
from verl_mg.models.hf_config import read_config

RANKS, ROWS = 8, 12

EVERY_PART = ["core_attn", "layernorm", "mla_up_proj", "mlp", "moe"]
"""Parts of a layer that can be recomputed together."""
# Each dimension of parallelism once, recomputation included, and kinds of layers that `test_training.py` has not.
LAYOUTS = [
    ("shallow dense", "cp8", False),
    ("dense", "tp2-cp2-pp2-vpp3", True),
    ("latent", "tp2-cp2-pp2-vpp2-ep2-etp1", EVERY_PART),
    ("sinks", "tp2-cp2-pp2-ep2", False),
    ("shallow joint norms", "tp4-cp2-ep2-etp1", True),
]
NIGHTLY_RECOMPUTED = [
    ("latent", "tp2-cp2-pp2-vpp2-ep2-etp1", True),
    *(("latent", "tp2-pp2-vpp2-ep2", [part]) for part in (*EVERY_PART, "shared_experts")),
    ("latent", "ep2-cp2", ["core_attn", "mla_up_proj", "moe_act", "shared_experts"]),
    ("dense", "tp2-pp2-vpp2", ["layernorm", "mlp"]),
    ("capped", "tp2-cp2-pp2", ["core_attn", "layernorm"]),
    ("sinks", "tp2-cp2-pp2-vpp2-ep2-etp1", ["core_attn", "layernorm", "moe_act"]),
    ("sinks", "pp2-ep4", ["moe"]),
    ("tied", "pp4-vpp2", ["core_attn", "layernorm", "mlp"]),
    ("sparse", "tp2-cp2-pp2-vpp2-ep2-etp1", EVERY_PART),
    ("mixture", "tp2-ep4-etp1", ["layernorm", "moe_act"]),
    ("mixture", "pp2-vpp2-ep4", ["layernorm", "moe"]),
    ("linear", "tp2-cp2-pp2-ep2-etp1", ["core_attn", "layernorm", "moe_act", "shared_experts"]),
]
# Further combinations of the same dimensions.
NIGHTLY_LAYOUTS = [
    ("mixture", "tp2-pp2-vpp2-ep2", True),
    ("mixture", "tp2-ep4-etp1", False),
    ("capped", "tp2-cp2-pp2", False),
    ("dense", "cp8", False),
    ("dense", "tp4", False),
    ("dense", "pp2-vpp3", False),
    ("dense", "tp1", False),
    ("dense", "pp4", False),
    ("dense", "pp2-vpp2", False),
    ("dense", "tp2-cp2-pp2", False),
    ("dense", "tp2-pp2-vpp2", True),
    ("dense", "cp2-pp2-vpp3", False),
    ("dense", "tp2-pp4", True),
    ("tied", "pp8", False),
    ("tied", "pp4-vpp2", False),
    ("tied", "tp2-pp4-vpp2", False),
    ("tied", "tp8", False),
    ("mixture", "ep8", False),
    ("mixture", "tp2", False),
    ("mixture", "tp2-ep4", False),
    ("mixture", "tp4-ep2-etp2", False),
    ("mixture", "tp2-ep8-etp1", False),
    ("mixture", "cp2-ep2", True),
    ("mixture", "tp2-cp2-pp2-ep4-etp1", False),
    ("mixture", "pp4-ep2", False),
    ("mixture", "pp2-vpp2", False),
    ("mixture", "pp2-vpp2-ep4", False),
    ("mixture", "tp2-cp2-pp2-vpp2-ep2-etp1", False),
    ("latent", "ep8", False),
    ("latent", "tp4-ep2", False),
    ("latent", "tp2-cp2-ep4-etp1", False),
    ("latent", "pp4-ep2", True),
    ("latent", "cp2-pp2-vpp2", False),
    ("latent", "tp2-pp2-vpp2-ep2", False),
    ("latent flash", "tp2-cp2-pp2-vpp2-ep2-etp1", True),
    ("latent flash", "tp4-ep2-etp2", False),
    ("latent flash", "pp4-ep2", False),
    ("latent flash", "cp4-ep8", False),
    ("latent without query rank", "tp2-cp2-pp2-ep2-etp1", False),
    ("latent without query rank", "tp4-ep8-etp1", True),
    ("capped", "tp2-pp2-vpp2", True),
    ("partly rotated", "tp2-cp2-pp2-ep4-etp1", False),
    ("partly rotated", "tp4-ep2-etp2", False),
    ("partly rotated", "ep8", True),
    ("partly rotated", "pp4-ep2", False),
    ("partly rotated", "cp4", False),
    ("sinks", "tp4-ep2-etp2", False),
    ("sinks", "tp2-ep8-etp1", False),
    ("sinks", "cp4-ep4", False),
    ("sinks", "tp4", True),
    ("sinks", "pp2-vpp2", True),
    ("sinks", "ep8", False),
    ("linear", "tp2-cp2-pp2-ep2-etp1", False),
    ("linear", "tp4-ep2-etp2", False),
    ("linear", "ep8", False),
    ("linear", "tp2-pp2-vpp2-ep2", True),
    ("linear mixture", "tp2-cp2-pp2-ep2-etp1", False),
    ("linear mixture", "cp4-ep4", True),
    ("linear mixture", "tp4-pp2-ep2-etp2", False),
    ("linear dense", "cp8", False),
    ("linear dense", "tp2-cp4", False),
    ("linear dense", "tp2-pp4", True),
    ("sparse", "tp2-cp2-pp2-ep2-etp1", False),
    ("sparse", "tp2-cp4-ep2", True),
    ("sparse", "tp4-ep2-etp2", False),
    ("sparse", "pp4-ep2", False),
    ("sparse", "cp8", False),
    ("joint norms", "tp2-cp2-pp2-vpp2-ep2-etp1", False),
    ("joint norms", "tp4-ep2-etp2", False),
    ("joint norms", "pp4-ep2", False),
    ("joint norms", "tp4-cp2-ep2-etp1", True),
]
# Values of tokens, and of whole rows at their last token.
HEADS = {"critic": 1, "reward model": 0}
HEAD_LAYOUTS = [("reward model", "dense", "tp2-pp4", True)]
NIGHTLY_HEAD_LAYOUTS = [
    ("critic", "mixture", "ep8", False),
    ("critic", "dense", "pp2-vpp3", False),
    ("critic", "dense", "tp2-cp4", False),
    ("critic", "tied", "tp2-pp4-vpp2", False),
    ("critic", "mixture", "tp2-cp2-pp2-vpp2-ep2-etp1", True),
]
OTHER_HEADS = [
    ("critic" if head == "reward model" else "reward model", *case)
    for head, *case in [*HEAD_LAYOUTS, *NIGHTLY_HEAD_LAYOUTS]
]

OPTIONS = {
    # Small buckets, so that these tiny models have several on each rank.
    "overlap": {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 2000}},
    "shared experts": {"transformer": {"moe_shared_expert_overlap": True}},
}
OPTION_LAYOUTS = [("overlap", "mixture", "tp2-pp2", False)]
NIGHTLY_OPTION_LAYOUTS = [
    ("overlap", "dense", "tp2-cp2-pp2", True),
    ("overlap", "dense", "pp2-vpp3", False),
    ("overlap", "tied", "tp2-pp2-vpp2", False),
    ("overlap", "tied", "tp1", True),
    ("overlap", "mixture", "tp2-ep4-etp1", False),
    ("overlap", "mixture", "tp2-pp2-vpp2-ep2", True),
    ("overlap", "latent", "tp2-cp2-pp2-vpp2-ep2-etp1", False),
    ("overlap", "latent", "tp2-ep2", False),
    ("overlap", "capped", "tp2-pp2-vpp2", True),
    ("overlap", "sinks", "tp2-cp2-ep4-etp1", False),
    ("shared experts", "latent", "tp2-cp2-pp2-vpp2-ep2-etp1", False),
    ("shared experts", "latent", "ep4", True),
]


def with_nightly(cases, nightly):
    return [*cases, *(pytest.param(*case, marks=pytest.mark.nightly) for case in nightly)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return ModelFolders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def single(ranks, models):
    """A function: model, batch, head -> results of one rank."""

    @cache
    def results(name, head="language", hidden_offset=1):
        batch = rows(models[name]) if head == "language" else scored_rows(models[name], hidden_offset)
        return one_rank(ranks.run(1, train, models[name], "tp1", batch, False, head, hidden_offset)[0])

    return results


def rows(model):
    return random_rows(ROWS, read_config(model).vocab)


@pytest.mark.parametrize(
    ("name", "layout", "recompute"), with_nightly(LAYOUTS, [*NIGHTLY_LAYOUTS, *NIGHTLY_RECOMPUTED])
)
def test_train_under_layout_equals_one_rank(ranks, models, single, name, layout, recompute):
    assert not single(name).idle()
    assert_equal(ranks.run(RANKS, train, models[name], layout, rows(models[name]), recompute), single(name), 1e-5)


def scored_rows(model, hidden_offset):
    """A reward model reads a row at its last token."""
    batch = rows(model)
    if not hidden_offset:
        batch["loss_mask"] = batch.last
    return batch


@pytest.mark.parametrize(
    ("head", "name", "layout", "recompute"), with_nightly(HEAD_LAYOUTS, [*NIGHTLY_HEAD_LAYOUTS, *OTHER_HEADS])
)
def test_train_value_head_under_layout_equals_one_rank(ranks, models, single, head, name, layout, recompute):
    expected, batch = single(name, "value", HEADS[head]), scored_rows(models[name], HEADS[head])
    assert not expected.idle()
    assert_equal(ranks.run(RANKS, train, models[name], layout, batch, recompute, "value", HEADS[head]), expected, 1e-5)


@pytest.mark.parametrize(
    ("option", "name", "layout", "recompute"), with_nightly(OPTION_LAYOUTS, NIGHTLY_OPTION_LAYOUTS)
)
def test_train_with_option_under_layout_equals_one_rank(ranks, models, single, option, name, layout, recompute):
    options = (recompute, "language", 1, torch.float32, MegatronConfig(**OPTIONS[option]))
    assert_equal(ranks.run(RANKS, train, models[name], layout, rows(models[name]), *options), single(name), 1e-5)
