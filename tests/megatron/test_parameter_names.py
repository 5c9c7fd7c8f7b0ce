"""The parameters of real megatron-core models, of every family and layout, are those of the weight table."""

from itertools import chain

import pytest
import torch

from tests.megatron.built_parameters import build, differences
from verl_mg.layout import Layout
from verl_mg.megatron.model import parameters_by_name

# (layout, ranks); the models have 4 layers, so that 3 stages are uneven runs of them.
LAYOUTS = [("tp1", 1), ("tp2", 2), ("pp3", 3), ("pp2-vpp2", 2), ("tp2-pp2", 4)]
WITH_EXPERTS = [("ep2", 2), ("tp2-ep2-etp1", 2), ("tp2-ep2", 4), ("pp3-ep2", 6), ("tp2-pp2-ep2-etp1", 8)]


@pytest.mark.parametrize(("layout", "count"), LAYOUTS + WITH_EXPERTS)
def test_parameter_names_and_shapes_equal_the_weight_table(ranks, configs, layout, count):
    fitting = {family: c for family, c in configs.items() if c.experts or (layout, count) in LAYOUTS}
    assert ranks.run(count, differences, fitting, layout) == [{}] * count


def layer_numbers(config, text):
    """The layers by the number megatron-core gives them, chunk by chunk, and which of them have experts."""
    chunks = [list(chunk.decoder.layers) for chunk in build({"": config}, text)[""]]
    numbers = [[layer.layer_number - 1 for layer in chunk] for chunk in chunks]
    return numbers, [layer.layer_number - 1 for layer in chain(*chunks) if hasattr(layer.mlp, "experts")]


@pytest.mark.parametrize(("text", "count"), [("pp3", 3), ("pp2", 2), ("pp2-vpp2", 2)])
def test_layer_numbers_of_uneven_stages_equal_the_layout(ranks, configs, text, count):
    layout = Layout.parse(text)
    for rank, (numbers, with_experts) in enumerate(ranks.run(count, layer_numbers, configs["deepseek_v3"], text)):
        assert numbers == [list(layout.layers(4, rank, chunk)) for chunk in range(layout.vpp)]
        assert with_experts == [layer for layer in chain(*numbers) if layer >= 1]


def attributes(config, layout):
    """{name: (cut over ranks, along which dimension, in how many slabs, reduced over all data-parallel ranks)}"""
    chunks = build({"": config}, layout)[""]
    return {
        name: (
            getattr(tensor, "tensor_model_parallel", False),
            getattr(tensor, "partition_dim", -1),
            getattr(tensor, "partition_stride", 1),
            getattr(tensor, "allreduce", True),
        )
        for name, tensor in parameters_by_name(chunks).items()
    }


def test_parameters_are_marked_as_shards_and_experts(ranks, configs):
    for found in ranks.run(4, attributes, configs["deepseek_v3"], "tp2-ep2"):
        first, last = "decoder.layers.0.", "decoder.layers.3."
        assert found["embedding.word_embeddings.weight"] == (True, 0, 1, True)
        assert found[first + "self_attention.linear_proj.weight"] == (True, 1, 1, True)
        assert found[first + "mlp.linear_fc1.weight"] == (True, 0, 2, True)
        assert found[last + "mlp.shared_experts.linear_fc2.weight"] == (True, 1, 1, True)
        assert found[last + "mlp.experts.linear_fc1.weight"] == (True, 1, 2, False)
        assert found[last + "mlp.experts.linear_fc2.weight"] == (True, 2, 1, False)
        assert found[last + "mlp.router.weight"][::3] == (False, True)
        assert found[first + "self_attention.kv_layernorm.weight"][::3] == (False, True)


def dtypes(config):
    return {name: tensor.dtype for name, tensor in parameters_by_name(build({"": config}, "tp1")[""]).items()}


def test_parameters_in_float32_are_only_router_biases(ranks, configs):
    (found,) = ranks.run(1, dtypes, configs["deepseek_v3"])
    assert {name for name, dtype in found.items() if dtype is torch.float32} == {
        f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in (1, 2, 3)
    }
    assert set(found.values()) == {torch.float32, torch.bfloat16}
