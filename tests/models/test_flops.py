"""Predicted FLOPs against those that torch counts, and against numbers counted by hand."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from verl_mg.models.flops import active_elements, layer_elements, orthogonalization_flops, row_flops
from verl_mg.models.hf_config import read_config
from verl_mg.models.hf_tensors import model_spec
from verl_mg.models.tensor_index import index_of
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.sharding.weight_table import weight_table


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("qwen3", {"head_dim": 24}),
        ("qwen2", {"tie_embeddings": True}),
        ("deepseek_v3", {"dense_layers": 2}),
    ],
)
def test_row_flops_equal_the_count_of_torch(tmp_path, architecture, options):
    """Without a causal mask, so twice the pairs; DeepSeek's layers are dense here, since loops over experts vary."""
    config = read_config(make_tiny_model(tmp_path, architecture, **options))
    predicted, length = row_flops(config, index_of(model_spec(config))), 48
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tmp_path), dtype=torch.float32, attn_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64))
    expected = predicted(length) + predicted.per_pair * length**2
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_row_flops_mixture_counts_top_k_experts(tmp_path):
    make_tiny_model(tmp_path, "qwen3_moe", experts=8)
    c = read_config(tmp_path)
    flops = row_flops(c, index_of(model_spec(c)))
    assert c.experts is not None
    attention = 2 * c.hidden * c.head_dim * (c.heads + c.kv_heads)
    a_layer = attention + c.experts.top_k * 3 * c.hidden * c.experts.ffn + c.experts.count * c.hidden
    by_hand = 2 * (c.layers * a_layer + c.vocab * c.hidden)
    assert flops.per_token == pytest.approx(by_hand, rel=0.01)  # norms are counted as matrices
    assert flops.per_pair == 2 * c.layers * c.heads * c.head_dim


def test_row_flops_value_head_has_no_vocabulary(tmp_path):
    config = read_config(make_tiny_model(tmp_path, "llama"))
    tables = (weight_table(config, head) for head in ("language", "value"))
    language, value = (row_flops(config, table.tensor_index) for table in tables)
    assert language.per_token - value.per_token == 2 * (config.vocab - 1) * config.hidden


@pytest.mark.parametrize(
    "name", ["qwen3_30b_a3b", "qwen3_235b_a22b", "deepseek_v3", "deepseek_v3_2", "glm_5", "qwen3_32b", "llama_3_1_405b"]
)
def test_layer_elements_add_up_to_the_active_elements(name):
    """Against the tensors of the checkpoint; norms and biases, which are no matrices, are below a thousandth."""
    config = read_config(Path(__file__).parents[2] / "tools" / "model_configs" / f"{name}.json")
    layers = sum(layer_elements(config, config.has_experts(layer)).all for layer in range(config.layers))
    expected = active_elements(config, index_of(model_spec(config)))
    assert layers + config.vocab * config.hidden == pytest.approx(expected, rel=1e-3)


def test_orthogonalization_flops_equal_the_count_of_torch(tmp_path):
    """Five iterations on every matrix of the layers, as Muon computes them."""
    config = read_config(make_tiny_model(tmp_path, "llama"))
    index = index_of(model_spec(config))
    matrices = [e.tensor.shape for e in index.entries.values() if e.layer is not None and len(e.tensor.shape) == 2]
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        for shape in matrices:
            x = torch.empty(min(shape), max(shape))
            for _ in range(5):
                gram = x @ x.T
                x = (gram + gram @ gram) @ x
    assert orthogonalization_flops(index) == counter.get_total_flops()
