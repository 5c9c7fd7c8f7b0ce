"""The weight table against an independent reading of Megatron's layouts, by gathering everything and cutting it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_mg.errors import UserError
from verl_mg.layout import Layout
from verl_mg.weights import HFConfig, Shard, table
from verl_mg.weights.boxes import slices
from verl_mg.weights.model_config import parse_config, read_config


def config_of(architecture: str, tp: int, layers: int, groups: int, per_group: int, vocab: int, tied: bool) -> HFConfig:
    return parse_config(
        {
            "model_type": architecture,
            "num_hidden_layers": layers,
            "hidden_size": 6,
            "num_attention_heads": tp * groups * per_group,
            "num_key_value_heads": tp * groups,
            "head_dim": 4,
            "intermediate_size": 5 * tp,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
        }
    )


configs = st.builds(
    lambda **sizes: (config_of(**sizes), sizes["tp"]),
    architecture=st.sampled_from(["llama", "qwen2", "qwen3"]),
    tp=st.sampled_from([1, 2, 4]),
    layers=st.sampled_from([2, 4]),
    groups=st.integers(1, 2),
    per_group=st.integers(1, 3),
    vocab=st.integers(1, 70),
    tied=st.booleans(),
)


def checkpoint(config: HFConfig) -> dict[str, torch.Tensor]:
    """Every element of the model is another number."""
    tensors, start = {}, 1
    for name, shard in table(config).huggingface().items():
        count = torch.Size(shard.shape).numel()
        tensors[name] = torch.arange(start, start + count).reshape(shard.shape)
        start += count
    return tensors


def assemble(shard: Shard, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The shard as loading fills it; asserts that each element is written exactly once, declared padding aside."""
    values, writes = torch.zeros(shard.shape, dtype=torch.int64), torch.zeros(shard.shape, dtype=torch.int64)
    for piece in shard.pieces:
        values[slices(piece.target)] = tensors[piece.tensor][slices(piece.source)]
        writes[slices(piece.target)] += 1
    for box in shard.padding:
        writes[slices(box)] += 1
    assert (writes == 1).all()
    return values


def megatron_reference(config: HFConfig, tensors: dict[str, torch.Tensor], layer: int, tp: int, rank: int):
    """One layer's fused weights as Megatron documents them, written with views of the whole tensors."""
    prefix, h = f"model.layers.{layer}.", config.hidden
    groups, d = config.kv_heads, config.head_dim
    q, k, v = (tensors[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv")
    qkv = torch.cat([q.view(groups, -1, d, h), k.view(groups, 1, d, h), v.view(groups, 1, d, h)], dim=1)
    gate, up = (tensors[f"{prefix}mlp.{x}_proj.weight"].chunk(tp)[rank] for x in ("gate", "up"))
    return {
        "self_attention.linear_qkv.weight": qkv.reshape(-1, h).chunk(tp)[rank],
        "self_attention.linear_proj.weight": tensors[f"{prefix}self_attn.o_proj.weight"].chunk(tp, dim=1)[rank],
        "mlp.linear_fc1.weight": torch.cat([gate, up]),
        "mlp.linear_fc2.weight": tensors[f"{prefix}mlp.down_proj.weight"].chunk(tp, dim=1)[rank],
        "input_layernorm.weight": tensors[f"{prefix}input_layernorm.weight"],
        "pre_mlp_layernorm.weight": tensors[f"{prefix}post_attention_layernorm.weight"],
    }


@given(configs, st.sampled_from([1, 2]))
@settings(max_examples=60)
def test_megatron_shards_equal_the_cut_of_the_gathered_weights(config_and_tp, pp):
    config, tp = config_and_tp
    tensors = checkpoint(config)
    layout = Layout(tp=tp, pp=pp, dp=2)
    for rank in range(layout.ranks):
        at = layout.coordinates(rank)
        shards = table(config).megatron(layout, rank)
        values = {name: assemble(shard, tensors) for name, shard in shards.items()}
        per_stage = config.layers // pp
        for local in range(per_stage):
            reference = megatron_reference(config, tensors, at.pp * per_stage + local, tp, at.tp)
            for name, expected in reference.items():
                assert torch.equal(values[f"decoder.layers.{local}.{name}"], expected), name


@given(configs)
@settings(max_examples=60)
def test_vocabulary_shards_put_together_are_the_vocabulary(config_and_tp):
    config, tp = config_and_tp
    tensors = checkpoint(config)
    layout = Layout(tp=tp)
    parts = [
        assemble(table(config).megatron(layout, r)["embedding.word_embeddings.weight"], tensors) for r in range(tp)
    ]
    whole = torch.cat(parts)
    assert torch.equal(whole[: config.vocab], tensors["model.embed_tokens.weight"])
    assert not whole[config.vocab :].any()
    assert len(whole) == table(config).padded_vocab(tp) and len(parts[0]) % 8 == 0


def test_biases_follow_the_query_groups():
    config = config_of("qwen2", tp=2, layers=2, groups=1, per_group=2, vocab=5, tied=False)
    tensors = checkpoint(config)
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.bias"] for x in "qkv")
    shard = table(config).megatron(Layout(tp=2), 1)["decoder.layers.1.self_attention.linear_qkv.bias"]
    assert torch.equal(assemble(shard, tensors), torch.cat([q[8:], k[4:], v[4:]]))


def test_a_tied_output_layer_is_a_parameter_only_away_from_the_embedding():
    tied = config_of("qwen3", tp=1, layers=2, groups=1, per_group=1, vocab=5, tied=True)
    assert "lm_head.weight" not in table(tied).huggingface()
    assert "output_layer.weight" not in table(tied).megatron(Layout(), 0)
    last = table(tied).megatron(Layout(pp=2), 1)
    assert last["output_layer.weight"].pieces[0].tensor == "model.embed_tokens.weight"


def test_interleaved_chunks_hold_their_layers():
    config = config_of("llama", tp=1, layers=4, groups=1, per_group=1, vocab=5, tied=False)
    shards = table(config).megatron(Layout(pp=2, vpp=2), 1)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    layers = [shards[f"chunk{chunk}.{name}"].pieces[0].tensor for chunk in (0, 1)]
    assert layers == ["model.layers.1.mlp.down_proj.weight", "model.layers.3.mlp.down_proj.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported are llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"hidden_size": None}, "a size is not a number"),
    ],
)
def test_a_model_that_is_not_built_is_refused(change, message):
    raw = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    parse_config(raw)
    with pytest.raises(UserError, match=message):
        parse_config(raw | change)
    del raw["vocab_size"]
    with pytest.raises(UserError, match="field 'vocab_size' is missing"):
        parse_config(raw)


def test_a_missing_or_broken_directory_is_named(tmp_path):
    with pytest.raises(UserError, match="no such model directory"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"config\.json: missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not a readable JSON file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UserError, match="a list, not an object"):
        read_config(tmp_path)
