"""Every kind of parallelism, alone and together, on eight ranks: all that training computes, against one rank."""

from functools import cache

import pytest

from tests.megatron.layout_models import MODELS, make_model
from tests.megatron.training import assert_equal, one_rank, train
from tests.tiny_models import random_rows
from verl_mg.models.hf_config import read_config

RANKS, ROWS = 8, 12

# Each dimension of parallelism and each kind of layer once, recomputation included.
LAYOUTS = [
    ("dense", "cp8", False),
    ("dense", "tp2-cp2-pp2-vpp3", True),
    ("latent", "tp2-cp2-pp2-vpp2-ep2-etp1", True),
]
# Further combinations of the same dimensions.
NIGHTLY_LAYOUTS = [
    ("mixture", "tp2-pp2-vpp2-ep2", True),
    ("mixture", "tp2-ep4-etp1", False),
    ("capped", "tp2-cp2-pp2", False),
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
    ("capped", "tp2-pp2-vpp2", True),
]
# Values of tokens, and of whole rows at their last token.
HEADS = {"critic": 1, "reward model": 0}
HEAD_LAYOUTS = [
    ("reward model", "dense", "tp2-pp4", True),
]
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


def with_nightly(cases, nightly):
    return [*cases, *(pytest.param(*case, marks=pytest.mark.nightly) for case in nightly)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder / name, name) for name in MODELS}


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


@pytest.mark.parametrize(("name", "layout", "recompute"), with_nightly(LAYOUTS, NIGHTLY_LAYOUTS))
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
