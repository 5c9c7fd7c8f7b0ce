"""Gradients, their norm and two optimizer steps: one rank against `transformers`, and against it layouts of few ranks
under the models that the matrix of layouts leaves out.
"""

import gc
from functools import cache

import pytest
from megatron.core.distributed import DistributedDataParallel

from tests.helpers.tiny_models import LATENT, LINEAR, MIXTURES, SPARSE, daily_of, nightly, oracle, rows_for
from tests.megatron.training import assert_equal, one_rank, train, train_in_plain_torch
from verl_mg.config import MegatronConfig
from verl_mg.models.hf_config import read_config

LAYOUTS = {
    ("mixtral",): [
        *(("ep2", 2), ("tp2-ep2-etp1", 4), ("tp2-ep2", 4), ("tp2", 2), ("tp1", 2), ("tp2-etp1", 2)),
        *(("tp2-ep2-etp1", 2), ("tp2-pp2", 4), ("pp2-ep2", 4), ("ep4", 4)),
    ],
    # Few heads to cut.
    LATENT: [
        *(("cp2", 2), ("tp2-pp2-ep2-etp1", 4), ("tp2", 2), ("pp2", 2), ("ep2", 2), ("tp4", 4), ("tp2-cp2-ep2", 4)),
    ],
    SPARSE: [("tp2-cp2", 4), ("tp2-pp2-ep2-etp1", 4), ("cp2", 2), ("ep4", 4), ("tp2-cp2-ep2", 4)],
    # Also more context-parallel ranks than key heads.
    LINEAR: [("tp2-cp2", 4), ("tp2", 2), ("cp2", 2), ("cp4", 4), ("pp2", 2)],
    ("gemma2",): [("cp2", 2), ("tp2-cp2", 4), ("tp2-pp2", 4), ("tp2", 2), ("pp2", 2)],
}
"""{models: layouts and their ranks}."""
CASES = [(name, *layout) for names, layouts in LAYOUTS.items() for name in names for layout in layouts]
DAILY = [
    *(("mixtral", "ep2", 2), ("mixtral", "tp2-ep2-etp1", 4), ("deepseek_v3", "cp2", 2)),
    *(("deepseek_v3", "tp2-pp2-ep2-etp1", 4), ("glm_moe_dsa", "tp2-cp2", 4), ("qwen3_next", "tp2-cp2", 4)),
    *(("gemma2", "cp2", 2), ("gemma2", "tp2-cp2", 4), ("gemma2", "tp2-pp2", 4)),
]


@pytest.fixture(scope="module")
def single(ranks, families):
    """A function: model -> what one rank computes."""
    return cache(lambda name: one_rank(ranks.run(1, train, families[name], "tp1", rows_for(families[name]))[0]))


@pytest.mark.parametrize("name", ["gemma2", *MIXTURES, "unnormalized", *LATENT, *SPARSE, *LINEAR])
def test_train_on_one_rank_equals_transformers(ranks, families, tmp_path, name):
    model, rows = families[name], rows_for(families[name])
    expected = train_in_plain_torch(oracle(model), rows, tmp_path)
    assert not expected.idle()
    assert_equal(ranks.run(1, train, model, "tp1", rows), expected, 2e-5)


@pytest.mark.parametrize(("name", "layout", "count"), daily_of(CASES, *DAILY))
def test_train_under_layout_equals_one_rank(ranks, families, single, name, layout, count):
    model, rows = families[name], rows_for(families[name])
    recompute = layout != "cp2" if name in SPARSE else "pp2" in layout
    if name in SPARSE:  # rows with more tokens than a token attends to, and with fewer
        top_k = read_config(model).indexer.top_k
        assert rows.lengths.min() < top_k and (rows.lengths > top_k + 3).sum() > 2
    assert_equal(ranks.run(count, train, model, layout, rows, recompute), single(name), 1e-5)


@pytest.mark.parametrize(
    ("name", "layout", "count"),
    [
        ("gemma2", "cp8", 8),  # more context-parallel ranks than heads
        *nightly(
            *(("qwen3", "cp8", 8), ("gemma2", "tp2-cp2-pp2", 8), ("deepseek_v3", "tp2-cp4", 8)),
            *(("deepseek_v2", "cp2-pp2", 4), ("mixtral", "cp2-ep2", 4), ("gpt_oss", "cp8", 8)),
            ("gpt_oss", "tp2-cp2-ep2", 4),
        ),
    ],
)
def test_train_with_gathered_keys_equals_one_rank(ranks, families, single, name, layout, count):
    model, fields = families[name], MegatronConfig(transformer={"cp_comm_type": "all_gather"})
    results = ranks.run(count, train, model, layout, rows_for(model), "pp2" in layout, megatron=fields)
    assert_equal(results, single(name), 1e-5)


@pytest.mark.parametrize("name", ["gemma2", *nightly(*LATENT)])
def test_train_value_head_under_pipeline_equals_one_rank(ranks, families, name):
    model, rows = families[name], rows_for(families[name])
    alone = one_rank(ranks.run(1, train, model, "tp1", rows, head="value")[0])
    assert not alone.idle()
    assert_equal(ranks.run(4, train, model, "tp2-pp2", rows, True, "value"), alone, 1e-5)


def left_behind(model):
    train(model, "tp1", rows_for(model))
    gc.collect()
    return sum(isinstance(thing, DistributedDataParallel) for thing in gc.get_objects())


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3", "gemma2"])
def test_trainer_after_deletion_frees_its_model(ranks, families, name):
    assert ranks.run(1, left_behind, families[name]) == [0]
