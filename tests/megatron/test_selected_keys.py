"""Replay of selected keys against `transformers` whose indexers give the prescribed keys."""

import pytest
import torch

from tests.helpers.given_keys import drawn_keys, net_with_keys, with_keys
from tests.helpers.tiny_models import nightly, rows_for, tiny_model
from tests.megatron.training import assert_equal, one_rank, train, train_in_plain_torch
from verl_mg.errors import UserError
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.fsdp.model_runner import FsdpRunner
from verl_mg.layout import Layout, Placement
from verl_mg.models.hf_config import read_config
from verl_mg.roles.role import columns_needed
from verl_mg.rows.plan import ColumnSchema
from verl_mg.training.model_spec import ModelSpec
from verl_mg.training.selected_keys import check_selected_keys

TOP_K, SELECTING = 8, (0, 1, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A GLM-5.2 whose third layer, the first one of a second pipeline stage, shares the selection of the second."""
    kinds = ["full", "full", "shared", "full"]
    return tiny_model(tmp_path_factory.mktemp("models") / "sparse", "glm_moe_dsa", indexer_types=kinds)


def rows(model, selections=None):
    batch = rows_for(model)
    return batch if selections is None else with_keys(batch, selections)


def drawn(model):
    return drawn_keys(rows(model), TOP_K, len(SELECTING))


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    net, _ = net_with_keys(model, SELECTING, drawn(model))
    return train_in_plain_torch(net, rows(model), tmp_path_factory.mktemp("expected"))


@pytest.mark.parametrize(
    ("layout", "count", "recompute"),
    [
        ("tp2-pp2", 4, True),
        *nightly(("tp1", 1, True), ("tp1", 1, False), ("tp2", 2, False), ("cp2", 2, True), ("pp2", 2, False)),
        *nightly(("tp2-cp2", 4, False), ("cp2-pp2", 4, False), ("pp2-vpp2", 2, False), ("tp2-cp2-pp2", 8, True)),
    ],
)
def test_train_with_selected_keys_equals_transformers(ranks, model, expected, layout, count, recompute):
    batch = rows(model, drawn(model))
    assert (batch["selection_sizes"] > 0).sum() > 15
    assert_equal(ranks.run(count, train, model, layout, batch, recompute), expected, 2e-5)


@pytest.mark.parametrize(("layout", "count"), [("tp1", 1), *nightly(("tp2-cp2", 4), ("pp2", 2))])
def test_train_with_the_keys_that_the_indexer_selects_changes_nothing(ranks, model, expected, layout, count):
    batch = rows(model)
    net, forced = net_with_keys(model, SELECTING, [None] * batch.total_tokens)
    with torch.no_grad():
        for row in range(len(batch)):
            net(batch.row("tokens", row)[None])
    own = [list(keys) for keys in zip(*(behind.selected for behind in forced), strict=True)]
    seen = [keys if p >= TOP_K else None for keys, p in zip(own, batch.positions.tolist(), strict=True)]
    free = ranks.run(count, train, model, layout, batch)
    for one, other in zip(free, ranks.run(count, train, model, layout, rows(model, seen)), strict=True):
        # Weights after the second step differ by what the first step changes in the indexers' own choice.
        assert one.norms[0] == pytest.approx(other.norms[0], rel=1e-6)
        assert all(torch.equal(output, other.outputs[row]) for row, output in one.outputs.items())
        for (name, box, a), (_, _, b) in zip(one.gradients, other.gradients, strict=True):
            assert torch.equal(a, b), (name, box)
    if count == 1:
        apart = zip(one_rank(free[0]).outputs, expected.outputs, strict=True)
        assert max((a[:2] - b[:2]).abs().max() for a, b in apart) > 0.1


def test_check_selected_keys_of_another_model_or_of_wrong_numbers_raises(model, configs):
    def broken(change):
        selections = drawn(model)
        change(next(own for own in selections if own))
        return rows(model, selections)

    config, two = read_config(model), rows(model, drawn(model))
    check_selected_keys(two, config)
    two["selected_keys"] = two["selected_keys"][:, :2].clone()
    check_selected_keys(two, configs["qwen3"])  # has no indexer, and ignores it
    early = [[[0], [0], [0]], *[None] * (two.total_tokens - 1)]
    for batch, message in [
        (two, r"its entries are \(2,\) torch.uint8, and the model needs one torch.uint8 for each of its 3 indexers"),
        (rows(model, early), "token 0 of row 0 does not have exactly 8 keys"),
        (broken(lambda own: own[1].pop()), "does not have exactly 8 keys up to itself in each layer"),
        (broken(lambda own: own[2].__setitem__(0, 15)), "does not have exactly 8 keys up to itself in each layer"),
    ]:
        with pytest.raises(UserError, match=message):
            check_selected_keys(batch, config)


@pytest.mark.parametrize(("layout", "stages"), [("pp2", [(0, 1), (2,)]), ("pp4", [(0,), (1,), (), (2,)])])
def test_each_pipeline_stage_needs_the_keys_of_its_indexers(model, layout, stages):
    config, batch = read_config(model), rows(model, drawn(model))
    schema = {name: ColumnSchema(batch.kind(name), batch[name].dtype, batch[name].shape[1:]) for name in batch.names()}
    for number, places in enumerate(stages):
        stage = Layout.parse(layout).stage(4, number)
        parts = {part.name: part.layers for part in columns_needed(schema, stage, config)}
        assert parts.get("selected_keys", ()) == places and ("selection_sizes" in parts) == bool(places)
    assert "noise" in parts


@pytest.mark.nightly
def test_fsdp_refuses_selected_keys(ranks, model):
    (error,) = ranks.run(1, error_of_fsdp, model, rows(model, drawn(model)))
    assert error.startswith("column 'selected_keys': fsdp does not replay selections of keys. Leave the column out")


def error_of_fsdp(model, batch):
    runner = FsdpRunner(ModelSpec(model, torch.float32), MeshGroups(Placement.on(Layout.parse("tp1"), 1)))
    with pytest.raises(UserError) as error:
        runner.infer([batch], 1.0)
    return str(error.value)
