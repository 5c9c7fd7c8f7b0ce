"""Gradients, their norm and two optimizer steps: one rank against `transformers`, and against it layouts of few ranks
under the models that the matrix of layouts leaves out.
"""

import gc
import json
import shutil
from functools import cache

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel

from tests.helpers.tiny_models import LATENT, LINEAR, MIXTURES, SPARSE, daily_of, oracle, random_rows, tiny_model
from tests.megatron.training import assert_equal, one_rank, train, train_in_plain_torch
from verl_mg.config import MegatronConfig
from verl_mg.models.hf_config import read_config

ROWS = 9
# (layout, ranks); with experts
EXPERT_LAYOUTS = [
    ("ep2", 2),
    ("tp2-ep2-etp1", 4),
    *(
        pytest.param(*layout, marks=pytest.mark.nightly)
        for layout in (
            ("tp2-ep2", 4),
            ("tp2", 2),
            ("tp1", 2),
            ("tp2-etp1", 2),
            ("tp2-ep2-etp1", 2),
            ("tp2-pp2", 4),
            ("pp2-ep2", 4),
            ("ep4", 4),
        )
    ),
]

# Latent attention has few heads to cut; Gemma 2 has no experts.
LATENT_LAYOUTS = [
    ("cp2", 2),
    ("tp2-pp2-ep2-etp1", 4),
    *(
        pytest.param(*layout, marks=pytest.mark.nightly)
        for layout in (("tp2", 2), ("pp2", 2), ("ep2", 2), ("tp4", 4), ("tp2-cp2-ep2", 4))
    ),
]
SPARSE_LAYOUTS = [
    ("glm_moe_dsa", "tp2-cp2", 4),
    *(
        pytest.param(name, *layout, marks=pytest.mark.nightly)
        for name in SPARSE
        for layout in (("tp2-pp2-ep2-etp1", 4), ("cp2", 2), ("ep4", 4), ("tp2-cp2-ep2", 4))
    ),
]
LINEAR_LAYOUTS = [
    ("tp2-cp2", 4),
    *(pytest.param(*layout, marks=pytest.mark.nightly) for layout in (("tp2", 2), ("cp2", 2), ("cp4", 4), ("pp2", 2))),
]
GEMMA_LAYOUTS = [
    ("cp2", 2),
    ("tp2-cp2", 4),
    ("tp2-pp2", 4),
    *(pytest.param(*layout, marks=pytest.mark.nightly) for layout in (("tp2", 2), ("pp2", 2))),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    names = ("qwen3", "gemma2", *MIXTURES, *LATENT, *SPARSE, *LINEAR)
    models = {name: tiny_model(folder / name, name, layers=2) for name in names}
    models["unnormalized"] = shutil.copytree(models["qwen3_moe"], folder / "unnormalized")
    config = models["unnormalized"] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"norm_topk_prob": False}))
    return models


@pytest.fixture(scope="module")
def single(ranks, models):
    """A function: model -> what one rank computes."""

    @cache
    def results(name):
        return one_rank(ranks.run(1, train, models[name], "tp1", rows(models[name]))[0])

    return results


def rows(model):
    return random_rows(ROWS, read_config(model).vocab)


@pytest.mark.parametrize("name", ["gemma2", *MIXTURES, "unnormalized", *LATENT, *SPARSE, *LINEAR])
def test_train_on_one_rank_equals_transformers(ranks, models, tmp_path, name):
    expected = train_in_plain_torch(oracle(models[name]), rows(models[name]), tmp_path)
    assert not expected.idle()
    assert_equal(ranks.run(1, train, models[name], "tp1", rows(models[name])), expected, 2e-5)


@pytest.mark.parametrize(("layout", "count"), EXPERT_LAYOUTS)
def test_train_mixture_under_layout_equals_one_rank(ranks, models, single, layout, count):
    model = models["mixtral"]
    assert_equal(ranks.run(count, train, model, layout, rows(model)), single("mixtral"), 1e-5)


@pytest.mark.parametrize(("layout", "count"), LATENT_LAYOUTS)
@pytest.mark.parametrize("name", daily_of(LATENT, "deepseek_v3"))
def test_train_latent_attention_under_layout_equals_one_rank(ranks, models, single, name, layout, count):
    recompute = "pp2" in layout
    assert_equal(ranks.run(count, train, models[name], layout, rows(models[name]), recompute), single(name), 1e-5)


@pytest.mark.parametrize(("name", "layout", "count"), SPARSE_LAYOUTS)
def test_train_sparse_attention_under_layout_equals_one_rank(ranks, models, single, name, layout, count):
    """Of rows with more tokens than a token attends to, and with fewer."""
    model, recompute = models[name], layout != "cp2"
    top_k = read_config(model).indexer.top_k
    assert rows(model).lengths.min() < top_k and (rows(model).lengths > top_k + 3).sum() > 2
    assert_equal(ranks.run(count, train, model, layout, rows(model), recompute), single(name), 1e-5)


@pytest.mark.parametrize(("layout", "count"), LINEAR_LAYOUTS)
@pytest.mark.parametrize("name", daily_of(LINEAR, "qwen3_next"))
def test_train_linear_attention_under_layout_equals_one_rank(ranks, models, single, name, layout, count):
    """Also where there are more context-parallel ranks than key heads."""
    recompute = "pp2" in layout
    assert_equal(ranks.run(count, train, models[name], layout, rows(models[name]), recompute), single(name), 1e-5)


@pytest.mark.parametrize(("layout", "count"), GEMMA_LAYOUTS)
def test_train_gemma_under_layout_equals_one_rank(ranks, models, single, layout, count):
    model, recompute = models["gemma2"], "pp2" in layout
    assert_equal(ranks.run(count, train, model, layout, rows(model), recompute), single("gemma2"), 1e-5)


@pytest.mark.parametrize(
    ("name", "layout", "count"),
    [
        ("gemma2", "cp8", 8),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("qwen3", "cp8", 8),
                ("gemma2", "tp2-cp2-pp2", 8),
                ("deepseek_v3", "tp2-cp4", 8),
                ("deepseek_v2", "cp2-pp2", 4),
                ("mixtral", "cp2-ep2", 4),
                ("gpt_oss", "cp8", 8),
                ("gpt_oss", "tp2-cp2-ep2", 4),
            )
        ),
    ],
)
def test_train_with_gathered_keys_equals_one_rank(ranks, models, single, name, layout, count):
    """Also where there are more context-parallel ranks than heads."""
    fields = MegatronConfig(transformer={"cp_comm_type": "all_gather"})
    options = ("pp2" in layout, "language", 1, torch.float32, fields)
    assert_equal(ranks.run(count, train, models[name], layout, rows(models[name]), *options), single(name), 1e-5)


@pytest.mark.parametrize("name", ["gemma2", *(pytest.param(name, marks=pytest.mark.nightly) for name in LATENT)])
def test_train_value_head_under_pipeline_equals_one_rank(ranks, models, name):
    model = models[name]
    alone = one_rank(ranks.run(1, train, model, "tp1", rows(model), False, "value")[0])
    assert not alone.idle()
    assert_equal(ranks.run(4, train, model, "tp2-pp2", rows(model), True, "value"), alone, 1e-5)


def left_behind(model):
    train(model, "tp1", rows(model))
    gc.collect()
    return sum(isinstance(thing, DistributedDataParallel) for thing in gc.get_objects())


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3", "gemma2"])
def test_trainer_after_deletion_frees_its_model(ranks, models, name):
    assert ranks.run(1, left_behind, models[name]) == [0]
