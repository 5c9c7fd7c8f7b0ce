"""Every kind of parallelism, alone and together, on eight ranks: all that training computes, against one rank."""

from functools import cache

import pytest

from tests.helpers.tiny_models import nightly, rows_for
from tests.megatron.training import assert_equal, one_rank, train
from verl_mg.config import MegatronConfig

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
NIGHTLY_LAYOUTS = {
    "mixture": "tp2-ep4-etp1 ep8 tp2 tp2-ep4 tp4-ep2-etp2 tp2-ep8-etp1 tp2-cp2-pp2-ep4-etp1 pp4-ep2 pp2-vpp2 "
    "pp2-vpp2-ep4 tp2-cp2-pp2-vpp2-ep2-etp1",
    "capped": "tp2-cp2-pp2",
    "dense": "cp8 tp4 pp2-vpp3 tp1 pp4 pp2-vpp2 tp2-cp2-pp2 cp2-pp2-vpp3",
    "tied": "pp8 pp4-vpp2 tp2-pp4-vpp2 tp8",
    "latent": "ep8 tp4-ep2 tp2-cp2-ep4-etp1 cp2-pp2-vpp2 tp2-pp2-vpp2-ep2",
    "latent flash": "tp4-ep2-etp2 pp4-ep2 cp4-ep8",
    "latent without query rank": "tp2-cp2-pp2-ep2-etp1",
    "partly rotated": "tp2-cp2-pp2-ep4-etp1 tp4-ep2-etp2 pp4-ep2 cp4",
    "sinks": "tp4-ep2-etp2 tp2-ep8-etp1 cp4-ep4 ep8",
    "linear": "tp2-cp2-pp2-ep2-etp1 tp4-ep2-etp2 ep8",
    "linear mixture": "tp2-cp2-pp2-ep2-etp1 tp4-pp2-ep2-etp2",
    "linear dense": "cp8 tp2-cp4",
    "sparse": "tp2-cp2-pp2-ep2-etp1 tp4-ep2-etp2 pp4-ep2 cp8",
    "joint norms": "tp2-cp2-pp2-vpp2-ep2-etp1 tp4-ep2-etp2 pp4-ep2",
}
"""Further combinations of the same dimensions, by model."""
NIGHTLY_RECOMPUTED_LAYOUTS = {
    "mixture": "tp2-pp2-vpp2-ep2 cp2-ep2",
    "dense": "tp2-pp2-vpp2 tp2-pp4",
    "latent": "pp4-ep2",
    "latent flash": "tp2-cp2-pp2-vpp2-ep2-etp1",
    "latent without query rank": "tp4-ep8-etp1",
    "capped": "tp2-pp2-vpp2",
    "partly rotated": "ep8",
    "sinks": "tp4 pp2-vpp2",
    "linear": "tp2-pp2-vpp2-ep2",
    "linear mixture": "cp4-ep4",
    "linear dense": "tp2-pp4",
    "sparse": "tp2-cp4-ep2",
    "joint norms": "tp4-cp2-ep2-etp1",
}
"""Those with recomputation of whole layers."""
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


def cases_of(table, recompute):
    return [(name, layout, recompute) for name, layouts in table.items() for layout in layouts.split()]


@pytest.fixture(scope="module")
def single(ranks, layout_models):
    """A function: model, batch, head -> results of one rank."""

    @cache
    def results(name, head="language", hidden_offset=1):
        batch = scored_rows(layout_models[name], hidden_offset)
        return one_rank(ranks.run(1, train, layout_models[name], "tp1", batch, False, head, hidden_offset)[0])

    return results


def scored_rows(model, hidden_offset=1):
    """A reward model reads a row at its last token."""
    batch = rows_for(model, ROWS)
    if not hidden_offset:
        batch["loss_mask"] = batch.last
    return batch


@pytest.mark.parametrize(
    ("name", "layout", "recompute"),
    [
        *LAYOUTS,
        *nightly(*cases_of(NIGHTLY_LAYOUTS, False), *cases_of(NIGHTLY_RECOMPUTED_LAYOUTS, True), *NIGHTLY_RECOMPUTED),
    ],
)
def test_train_under_layout_equals_one_rank(ranks, layout_models, single, name, layout, recompute):
    assert not single(name).idle()
    model = layout_models[name]
    assert_equal(ranks.run(RANKS, train, model, layout, rows_for(model, ROWS), recompute), single(name), 1e-5)


@pytest.mark.parametrize(
    ("head", "name", "layout", "recompute"), [*HEAD_LAYOUTS, *nightly(*NIGHTLY_HEAD_LAYOUTS, *OTHER_HEADS)]
)
def test_train_value_head_under_layout_equals_one_rank(ranks, layout_models, single, head, name, layout, recompute):
    model, expected = layout_models[name], single(name, "value", HEADS[head])
    assert not expected.idle()
    batch = scored_rows(model, HEADS[head])
    assert_equal(ranks.run(RANKS, train, model, layout, batch, recompute, "value", HEADS[head]), expected, 1e-5)


@pytest.mark.parametrize(
    ("option", "name", "layout", "recompute"), [*OPTION_LAYOUTS, *nightly(*NIGHTLY_OPTION_LAYOUTS)]
)
def test_train_with_option_under_layout_equals_one_rank(ranks, layout_models, single, option, name, layout, recompute):
    model, megatron = layout_models[name], MegatronConfig(**OPTIONS[option])
    results = ranks.run(RANKS, train, model, layout, rows_for(model, ROWS), recompute, megatron=megatron)
    assert_equal(results, single(name), 1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "layout", "recompute"), [*LAYOUTS, *cases_of(NIGHTLY_LAYOUTS, False)])
def test_train_by_kernels_of_logits_under_layout_equals_one_rank_without(
    kernel_ranks, layout_models, single, name, layout, recompute
):
    assert not single(name).idle()
    model = layout_models[name]
    results = kernel_ranks.run(RANKS, train, model, layout, rows_for(model, ROWS), recompute)
    assert_equal(results, single(name), 1e-5)
