"""Chosen numbers of layers of pipeline stages: what training computes and what is written, against one rank."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.helpers.roles import build_role
from tests.helpers.tiny_models import nightly, rows_for, tiny_model_with_multi_token_layer
from tests.megatron.training import assert_equal, one_rank, train
from verl_mg.config import OptimizerConfig
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.roles.models import Actor

# A layer without experts and four with them, divided inside and outside of the even numbers; stages with an embedding
# or an output layer alone; chunks of an interleaved schedule.
SPLITS = [("latent", "pp2-vpp2", (2, 1, 2, 0), False), ("dense", "pp4", (0, 2, 4, 0), False)]
NIGHTLY_SPLITS = [
    ("latent", "pp2", (1, 4), False),
    ("latent", "pp2-ep2", (4, 1), True),
    ("latent", "pp4", (0, 1, 3, 1), False),
    ("dense", "pp2", (6, 0), False),
    ("dense", "pp2", (0, 6), True),
    ("dense", "tp2-pp2", (5, 1), False),
    ("dense", "pp2-vpp2", (0, 1, 4, 1), True),
    ("tied", "pp4", (4, 1, 3, 1), False),
    ("tied", "pp2-vpp2", (1, 4, 1, 3), False),
    ("mixture", "pp2-ep2-cp2", (2, 3), False),
    ("sinks", "pp4", (2, 1, 1, 1), False),
    ("linear", "pp2-vpp2", (1, 2, 1, 1), False),
    ("linear mixture", "tp2-pp2-ep2-etp1", (4, 1), True),
    ("sparse", "pp4", (2, 2, 1, 0), False),
    ("joint norms", "tp2-pp2", (1, 4), False),
    ("capped", "pp4", (2, 1, 2, 0), True),
]


@pytest.mark.parametrize(("name", "text", "layers", "recompute"), [*SPLITS, *nightly(*NIGHTLY_SPLITS)])
def test_train_with_chosen_layers_equals_one_rank(ranks, layout_models, name, text, layers, recompute):
    model = layout_models[name]
    rows, layout = rows_for(model), Layout.parse(text, layers)
    expected = one_rank(ranks.run(1, train, model, "tp1", rows)[0])
    assert not expected.idle()
    assert_equal(ranks.run(layout.ranks, train, model, layout, rows, recompute), expected, 1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("layers", [(1, 5), (6, 0)])
def test_train_value_head_with_chosen_layers_equals_one_rank(ranks, layout_models, layers):
    model = layout_models["dense"]
    rows = rows_for(model)
    expected = one_rank(ranks.run(1, train, model, "tp1", rows, head="value")[0])
    assert not expected.idle()
    found = ranks.run(2, train, model, Layout(pp=2, pipeline_layers=layers), rows, head="value")
    assert_equal(found, expected, 1e-5)


def saved(model, layout, folder):
    actor = build_role(
        Actor, model, ParallelGroups(Placement.on(layout, dist.get_world_size())), optimizer=OptimizerConfig()
    )
    actor.cpu_offload.to_host()
    actor.cpu_offload.to_device()
    actor.save(folder, model)


@pytest.mark.nightly
@pytest.mark.parametrize("layers", [(3, 0), (1, 2), (0, 3)])
def test_directory_through_chosen_layers_is_bitwise_the_same(ranks, tmp_path, layers):
    """Also the layer of multi-token prediction, on a last stage with and without others, and after an offload."""
    model = tiny_model_with_multi_token_layer(tmp_path / "model", "deepseek_v3", 3)
    ranks.run(2, saved, model, Layout(pp=2, pipeline_layers=layers), tmp_path / "written")
    given, written = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "written"))
    assert written.keys() == given.keys() and any("layers.3." in name for name in given)
    assert all(torch.equal(written[name], values) for name, values in given.items())
