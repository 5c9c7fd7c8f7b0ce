"""Which layers stand for which others, and the table of all layers from that of a few."""

import json

import pytest

from tests.helpers.traces import folder_of
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.models.transformers_module import checkpoint_shapes
from verl_mg.sharding.boxes import Piece, Shard
from verl_mg.sharding.weight_table import weight_table
from verl_mg.tracing.layer_kinds import layer_kinds, write_first_layers


@pytest.mark.parametrize(
    ("family", "model_of"), [("llama", (0, 0, 0)), ("gemma2", (0, 0, 0)), ("deepseek_v3", (0, 1, 1))]
)
def test_layers_of_equal_tensors_are_of_one_kind(family, model_of):
    kinds = layer_kinds(checkpoint_shapes(folder_of(family)), 3)
    assert kinds is not None
    assert (kinds.prefix, kinds.model_of) == ("model.layers", model_of)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_table_of_first_layers_extends_to_that_of_all(tmp_path, family):
    shapes = checkpoint_shapes(folder_of(family))
    kinds = layer_kinds(shapes, 3)
    assert kinds is not None
    write_first_layers(json.loads((folder_of(family) / "config.json").read_text()), kinds.count, tmp_path)
    few, whole = (weight_table(read_config(folder)) for folder in (tmp_path, folder_of(family)))
    assert kinds.first_layers(shapes).keys() == few.huggingface().keys()
    for rank in range(2):
        shards = (table.engine_shards(EngineLayout(tp=2), rank) for table in (few, whole))
        assert kinds.extended(next(shards)) == next(shards)


def test_fields_with_an_entry_for_each_layer_are_cut(tmp_path):
    text = {"num_hidden_layers": 4, "layer_types": list("abab"), "eos_token_id": [1, 2], "name": "x"}
    write_first_layers({"model_type": "y", "text_config": text}, 2, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "model_type": "y",
        "text_config": {"num_hidden_layers": 2, "layer_types": ["a", "b"], "eos_token_id": [1, 2], "name": "x"},
    }


def test_tensors_that_are_not_numbered_by_layers_have_no_kinds():
    assert layer_kinds({"a.weight": (1,), "b.0.weight": (1,)}, 2) is None
    towers = {f"{tower}.{layer}.weight": (1,) for tower in ("text", "vision") for layer in range(2)}
    assert layer_kinds(towers, 2) is None  # which of them are the layers is not known


def test_parameter_of_several_layers_is_an_error():
    kinds = layer_kinds({"layers.0.a": (1,), "layers.1.a": (1,)}, 2)
    assert kinds is not None
    pieces = tuple(Piece(f"layers.{layer}.a", ((0, 1),), ((layer, layer + 1),)) for layer in range(2))
    with pytest.raises(UserError, match="parameter all has tensors of several layers"):
        kinds.extended({"all": Shard((2,), pieces)})
    with pytest.raises(UserError, match="parameter first does not have the number of its layer"):
        kinds.extended({"first": Shard((1,), pieces[:1])})
