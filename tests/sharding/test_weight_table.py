"""The weight table against an independent reading of Megatron, by slicing full tensors; engines have traces."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GlmMoeDsaConfig

from tests.helpers.random_models import (
    LATENT,
    MIXTURES,
    assemble,
    checkpoint,
    config,
    configs,
    fields,
    layouts,
    shard_map,
)
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, Layout, Placement
from verl_mg.models.hf_config import ClampedSwiGLU, parse_config, read_config
from verl_mg.models.hf_families import FAMILIES
from verl_mg.models.tensor_index import TensorEntry, TensorIndex
from verl_mg.models.tensor_tree import TensorSpec
from verl_mg.reshard.encode import EncodedSource
from verl_mg.reshard.encoding import FP8
from verl_mg.sharding.param_spec import ParamBlock, ParamRow
from verl_mg.sharding.shard_map import DerivedShardMap, ParallelIndex
from verl_mg.sharding.weight_table import weight_table


@given(st.data())
@settings(max_examples=80)
def test_shard_map_shards_of_all_ranks_cover_the_model(data):
    c = data.draw(configs())
    held = data.draw(shard_map(c))
    tensors = checkpoint(c)
    seen: set[int] = set()
    distinct: list[object] = []
    for rank in held.ranks:
        if (shards := held.shards(rank)) in distinct:
            continue
        distinct.append(shards)
        for name, shard in shards.items():
            values = assemble(shard, tensors)
            assert tuple(values.shape) == shard.shape, name
            seen.update(values.flatten().tolist())
    seen.discard(0)  # padding
    assert len(seen) == sum(tensor.numel() for tensor in tensors.values())


@given(st.data())
@settings(max_examples=100)
def test_shard_map_replicas_agree_with_shards(data):
    held = data.draw(shard_map(data.draw(configs())))
    from_shards = {
        (rank, piece.tensor, piece.source, parameter, piece.target)
        for rank in held.ranks
        for parameter, shard in held.shards(rank).items()
        for piece in shard.pieces
    }
    from_places = {
        (rank, tensor, place.box, spot.parameter, spot.parameter_box)
        for tensor in held.tensors
        for place in held.replicas(tensor)
        for spot in place.locations
        for rank in spot.ranks
    }
    assert from_places == from_shards
    for tensor in held.tensors:
        for place in held.replicas(tensor):
            assert place.ranks == tuple(sorted({rank for spot in place.locations for rank in spot.ranks}))


def test_replicas_of_more_tensors_than_are_kept_are_collected_again(monkeypatch):
    held, again = (weight_table(config("qwen3")).shard_map_megatron(Placement.on(Layout(tp=2), 2)) for _ in range(2))
    of_all = [held.replicas(tensor) for tensor in held.tensors]
    monkeypatch.setattr("verl_mg.sharding.shard_map.KEPT_TENSORS", 2)
    assert [again.replicas(tensor) for tensor in [*again.tensors] * 2] == of_all * 2 and len(of_all) > 2


@given(st.data())
@settings(max_examples=50)
def test_sharding_key_equal_means_same_boxes_on_same_ranks(data):
    held = data.draw(shard_map(data.draw(configs())))
    kinds: dict[object, list[object]] = {}
    for tensor in held.tensors:
        where = [(place.box, place.ranks) for place in held.replicas(tensor)]
        assert kinds.setdefault(held.sharding_key(tensor), where) == where


def megatron_reference(c, tensors, layer, tp, rank):
    """One layer's weights as Megatron documents them, written with views of the whole tensors."""
    p, h = f"model.layers.{layer}.", c.hidden

    def fused(gate, up, size, index):
        return torch.cat([tensors[p + gate].chunk(size)[index], tensors[p + up].chunk(size)[index]])

    found = {"input_layernorm.weight": tensors[p + "input_layernorm.weight"]}
    if not c.has_linear_attention(layer):
        found["self_attention.linear_proj.weight"] = tensors[p + "self_attn.o_proj.weight"].chunk(tp, dim=1)[rank]
    if c.has_linear_attention(layer):
        parts, convolved = linear_reference(c, tensors, p + "linear_attn.", tp, rank)
        found["self_attention.in_proj.weight"] = torch.cat([part.reshape(-1, h) for part in parts.values()])
        found["self_attention.conv1d.weight"] = convolved
        for name in ("A_log", "dt_bias"):
            found[f"self_attention.{name}"] = tensors[f"{p}linear_attn.{name}"].chunk(tp)[rank]
        found["self_attention.out_proj.weight"] = tensors[p + "linear_attn.out_proj.weight"].chunk(tp, dim=1)[rank]
    elif c.output_gate:
        q, gate = tensors[p + "self_attn.q_proj.weight"].view(c.kv_heads, -1, 2, c.head_dim, h).unbind(2)
        k, v = (tensors[f"{p}self_attn.{x}_proj.weight"].view(c.kv_heads, -1, h) for x in "kv")
        groups = torch.cat([q.flatten(1, 2), gate.flatten(1, 2), k, v], dim=1)
        found["self_attention.linear_qkv.weight"] = groups.reshape(-1, h).chunk(tp)[rank]
    elif c.latent:
        a = p + "self_attn."
        found["self_attention.linear_kv_down_proj.weight"] = tensors[a + "kv_a_proj_with_mqa.weight"].chunk(tp)[rank]
        found["self_attention.linear_kv_up_proj.weight"] = tensors[a + "kv_b_proj.weight"].chunk(tp)[rank]
        found["self_attention.kv_layernorm.weight"] = tensors[a + "kv_a_layernorm.weight"]
        if c.latent.q_rank:
            found["self_attention.linear_q_up_proj.weight"] = tensors[a + "q_b_proj.weight"].chunk(tp)[rank]
        else:
            found["self_attention.linear_q_proj.weight"] = tensors[a + "q_proj.weight"].chunk(tp)[rank]
    else:
        q, k, v = (tensors[f"{p}self_attn.{x}_proj.weight"] for x in "qkv")
        parts = [x.view(c.kv_heads, -1, c.head_dim, h) for x in (q, k, v)]
        found["self_attention.linear_qkv.weight"] = torch.cat(parts, dim=1).reshape(-1, h).chunk(tp)[rank]
    if not c.has_experts(layer):
        found["mlp.linear_fc1.weight"] = fused("mlp.gate_proj.weight", "mlp.up_proj.weight", tp, rank)
        found["mlp.linear_fc2.weight"] = tensors[p + "mlp.down_proj.weight"].chunk(tp, dim=1)[rank]
    return found


def linear_reference(c, tensors, p, tp, rank):
    """q, k, v, z, b, a of a rank's heads, each (key heads, rows, hidden), and its rows of the convolution."""
    linear, h = c.linear, c.hidden
    of_key, of_value = linear.key_dim, linear.value_heads // linear.key_heads * linear.value_dim
    if c.architecture == "qwen3_next":
        joint = tensors[p + "in_proj_qkvz.weight"].view(linear.key_heads, -1, h)
        parts = dict(zip("qkvz", joint.split([of_key, of_key, of_value, of_value], dim=1), strict=True))
        strength, decay = tensors[p + "in_proj_ba.weight"].view(linear.key_heads, 2, -1, h).unbind(1)
        parts |= {"b": strength, "a": decay}
    else:
        sizes = [linear.key_heads * of_key, linear.key_heads * of_key, linear.key_heads * of_value]
        parts = dict(zip("qkv", tensors[p + "in_proj_qkv.weight"].split(sizes), strict=True))
        parts |= {x: tensors[f"{p}in_proj_{x}.weight"] for x in "zba"}
        parts = {name: part.view(linear.key_heads, -1, h) for name, part in parts.items()}
    filters = tensors[p + "conv1d.weight"].split([linear.key_heads * n for n in (of_key, of_key, of_value)])
    return {name: part.chunk(tp)[rank] for name, part in parts.items()}, torch.cat([x.chunk(tp)[rank] for x in filters])


def expert_reference(c, tensors, layer, expert, etp, rank):
    """(fc1, fc2) of one expert."""
    p = f"model.layers.{layer}."
    if c.architecture == "gpt_oss":  # gate and up alternate
        gate_up, down = (tensors[f"{p}mlp.experts.{expert}.{name}"] for name in ("gate_up_proj", "down_proj"))
        return gate_up.chunk(etp)[rank], down.chunk(etp, dim=1)[rank]
    names = ("block_sparse_moe", "w1", "w3", "w2") if c.architecture in ("mixtral", "minimax_m2") else (
        "mlp", "gate_proj", "up_proj", "down_proj"
    )  # fmt: skip
    gate, up, down = (tensors[f"{p}{names[0]}.experts.{expert}.{name}.weight"] for name in names[1:])
    return torch.cat([gate.chunk(etp)[rank], up.chunk(etp)[rank]]), down.chunk(etp, dim=1)[rank]


@given(st.data())
@settings(max_examples=60)
def test_megatron_table_shards_equal_slices_of_full_tensors(data):
    c = data.draw(configs())
    layout = data.draw(layouts(c))
    tensors, held = checkpoint(c), weight_table(c).shard_map_megatron(Placement.on(layout, layout.ranks))
    compared: dict[object, object] = {}
    for rank in range(layout.ranks):
        at, shards = layout.coordinates(rank), held.shards(rank)
        if compared.setdefault((at.tp, at.pp, at.ep, at.etp), shards) is not shards:
            assert compared[at.tp, at.pp, at.ep, at.etp] == shards
            continue
        values = {name: assemble(shard, tensors) for name, shard in shards.items()}
        for chunk in range(layout.vpp):
            prefix = f"chunk{chunk}." if layout.vpp > 1 else ""
            for local, layer in enumerate(layout.layers(c.layers, at.pp, chunk)):
                here = f"{prefix}decoder.layers.{local}."
                for name, expected in megatron_reference(c, tensors, layer, layout.tp, at.tp).items():
                    assert torch.equal(values[here + name], expected), name
                if not c.has_experts(layer):
                    continue
                each = c.experts.count // layout.ep
                for own in range(each):
                    fc1, fc2 = expert_reference(c, tensors, layer, at.ep * each + own, layout.etp, at.etp)
                    assert torch.equal(values[f"{here}mlp.experts.linear_fc1.weight"][own], fc1)
                    assert torch.equal(values[f"{here}mlp.experts.linear_fc2.weight"][own], fc2)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("vocab", [5, 64, 101, 150])
def test_vocabulary_shards_concatenated_equal_the_vocabulary(tp, vocab):
    c = config("llama", vocab_size=vocab)
    tensors, model = checkpoint(c), weight_table(c)
    megatron = [model.megatron(Layout(tp=tp), rank)["embedding.word_embeddings.weight"] for rank in range(tp)]
    sglang = [model.engine_shards(EngineLayout(tp=tp), rank)["model.embed_tokens.weight"] for rank in range(tp)]
    for parts, rows in ((megatron, model.padded_vocab(tp)), (sglang, -(-vocab // 64) * 64)):
        whole = torch.cat([assemble(shard, tensors) for shard in parts])
        assert torch.equal(whole[:vocab], tensors["model.embed_tokens.weight"])
        assert not whole[vocab:].any()
        assert len(whole) == rows and rows % (8 * tp) == 0


def test_sglang_table_indivisible_vocabulary_is_padded_further():
    c = config("llama", num_attention_heads=6, num_key_value_heads=6, intermediate_size=12, vocab_size=65)
    assert weight_table(c).engine_shards(EngineLayout(tp=3), 0)["lm_head.weight"].shape[0] == 64


def test_megatron_table_qkv_bias_follows_query_groups():
    c = config("qwen2", num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    tensors = checkpoint(c)
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.bias"] for x in "qkv")
    shard = weight_table(c).megatron(Layout(tp=2), 1)["decoder.layers.1.self_attention.linear_qkv.bias"]
    assert torch.equal(assemble(shard, tensors), torch.cat([q[8:], k[4:], v[4:]]))


def test_tied_output_layer_is_a_parameter_only_on_another_stage():
    tied = weight_table(config("qwen3", tie_word_embeddings=True))
    assert "lm_head.weight" not in tied.huggingface()
    assert "output_layer.weight" not in tied.megatron(Layout(), 0)
    assert "lm_head.weight" not in tied.engine_shards(EngineLayout(), 0)
    megatron, engine = tied.megatron(Layout(pp=2), 1), tied.engine_shards(EngineLayout(pp=2), 1)
    for last in (megatron["output_layer.weight"], engine["lm_head.weight"]):
        assert last.pieces[0].tensor == "model.embed_tokens.weight"


def test_megatron_table_interleaved_chunks_have_their_layers():
    shards = weight_table(config("llama")).megatron(Layout(pp=2, vpp=2), 1)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    layers = [shards[f"chunk{chunk}.{name}"].pieces[0].tensor for chunk in (0, 1)]
    assert layers == ["model.layers.1.mlp.down_proj.weight", "model.layers.3.mlp.down_proj.weight"]


@pytest.mark.parametrize("name, order", [("p", (1, 0)), ("{expert}.p", (1, 0)), ("p", (0, 2, 1))])
def test_shards_of_a_transposed_parameter_keep_its_order(name, order):
    """Also those of an encoded source."""
    stacked, tensor = len(order) == 3, "e{expert}" if "{" in name or len(order) == 3 else "t"
    row = ParamRow(name, (TensorSpec(tensor, (4, 6)),), order=order)
    names = [tensor.format(expert=expert) for expert in range(2 if row.per_expert else 1)]
    entries = {n: TensorEntry(i, row.tensors[0], None, i if row.per_expert else None) for i, n in enumerate(names)}
    ranks = {0: ParallelIndex(0, 0, {"replicated": 0})}
    derived = DerivedShardMap(
        TensorIndex(entries, False), [[ParamBlock("", (row,))]], {"replicated": 1}, len(names), ranks
    )
    shards = derived.shards(0)
    encoded = {} if stacked else EncodedSource(derived, FP8(rows=2, columns=2), names).shards(0)
    values = [shard for name, shard in encoded.items() if "scale" not in name]
    assert {shard.parameter_shape for shard in (*shards.values(), *values)} == {(2, 6, 4) if stacked else (6, 4)}


def test_value_head_replaces_the_output_layer():
    critic = weight_table(config("llama"), head="value")
    for rank in range(4):
        output = critic.megatron(Layout(tp=2, pp=2), rank).get("output_layer.weight")
        assert (output is None) == (rank < 2)
        if output:
            assert (output.shape, output.pieces[0].tensor) == ((1, 8), "score.weight")


def test_transformer_engine_table_fuses_norms_and_groups_experts():
    moe = weight_table(config("qwen3_moe")).megatron(Layout(ep=2), 1, "transformer_engine")
    last = moe["decoder.layers.0.mlp.experts.linear_fc1.weight3"]
    assert last.pieces[0].tensor.endswith("experts.7.gate_proj.weight")
    norms = {"self_attention.linear_qkv.layer_norm_weight", "pre_mlp_layernorm.weight"}
    assert {f"decoder.layers.0.{norm}" for norm in norms} <= moe.keys()
    dense = weight_table(config("qwen3")).megatron(Layout(), 0, "transformer_engine")
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in dense
    latent = weight_table(config("deepseek_v3")).megatron(Layout(tp=4), 0, "transformer_engine")
    assert latent["decoder.layers.0.self_attention.linear_kv_down_proj.weight"].shape == (16, 8)


def test_parse_config_of_gpt_oss_has_its_fields_and_their_defaults():
    c = config("gpt_oss")
    assert (c.qkv_bias, c.output_bias, c.attention_sinks) == (True, True, True)
    assert c.sliding_windows == (128, None, 128, None)
    assert c.experts and c.experts.clamped == ClampedSwiGLU(alpha=1.702, limit=7.0) and c.experts.normalized
    given = config("gpt_oss", sliding_window=9, layer_types=["full_attention"] * 3 + ["sliding_attention"])
    assert given.sliding_windows == (None, None, None, 9)


def test_megatron_table_of_gpt_oss_cuts_sinks_and_biases():
    c = config("gpt_oss", intermediate_size=4)
    shards, tensors = weight_table(c).megatron(Layout(tp=2, ep=2, etp=2, dp=2), 3), checkpoint(c)
    prefix, layer = "decoder.layers.1.", "model.layers.1."
    values = {name.removeprefix(prefix): assemble(shard, tensors) for name, shard in shards.items()}
    sinks, bias = (tensors[f"{layer}self_attn.{name}"] for name in ("sinks", "o_proj.bias"))
    assert torch.equal(values["self_attention.core_attention.softmax_offset"], sinks[4:])
    assert torch.equal(values["self_attention.linear_proj.bias"], bias)
    assert torch.equal(values["mlp.router.bias"], tensors[layer + "mlp.router.bias"])
    fc1, fc2 = (tensors[f"{layer}mlp.experts.5.{name}_proj_bias"] for name in ("gate_up", "down"))
    assert torch.equal(values["mlp.experts.linear_fc1.bias"][1], fc1[4:])
    assert torch.equal(values["mlp.experts.linear_fc2.bias"][1], fc2)


def test_stacked_tensors_of_gpt_oss_are_transposed():
    stacked = weight_table(config("gpt_oss")).tensor_index.stacked
    place = stacked["model.layers.2.mlp.experts.3.gate_up_proj"]
    assert (place.name, place.shape) == ("model.layers.2.mlp.experts.gate_up_proj", (8, 8, 32))
    assert place.expert_shape == (32, 8) and place.box(((4, 6), (1, 3))) == ((3, 4), (1, 3), (4, 6))
    assert stacked["model.layers.2.mlp.experts.3.down_proj_bias"].box(((4, 6),)) == ((3, 4), (4, 6))


def test_tensors_of_an_indexer_are_frozen_and_partly_unquantized():
    table = weight_table(config("deepseek_v32"))
    prefix = "model.layers.2.self_attn.indexer."
    names = {f"{prefix}{name}" for name in ("wq_b.weight", "wk.weight", "weights_proj.weight")}
    assert names < table.indexers and len(table.indexers) == 4 * 5
    assert {name for name in names if name in table.unquantized} == {prefix + "weights_proj.weight"}
    assert {name.rsplit(".", 1)[0] for name in table.indexers if table.tensor_index.tensors[name].dtype} == {
        f"model.layers.{layer}.self_attn.indexer.k_norm" for layer in range(4)
    }


@pytest.mark.parametrize(
    ("changes", "sources"),
    [
        ({}, (0, 1, 2, 3)),
        ({"index_topk_freq": 2}, (0, 1, 1, 3)),
        ({"index_topk_freq": 4}, (0, 1, 1, 1)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (0, 0, 2, 2)),
        ({"index_topk_freq": 2, "index_topk_pattern": "FSSF"}, (0, 0, 0, 3)),
        ({"index_topk_pattern": "FSSF", "indexer_types": ["full", "full", "shared", "shared"]}, (0, 1, 1, 1)),
    ],
)
def test_layers_that_share_a_selection_have_no_indexer(changes, sources):
    """As transformers reads the fields."""
    model = fields("glm_moe_dsa", **changes)
    kinds = GlmMoeDsaConfig(**model).indexer_types
    assert [layer == source for layer, source in enumerate(sources)] == [kind == "full" for kind in kinds]
    table = weight_table(parse_config(model))
    assert table.config.indexer.sources == sources
    assert {int(name.split(".")[2]) for name in table.indexers} == set(sources)


def test_tensor_index_only_router_bias_is_float32():
    tensors = weight_table(config("deepseek_v3")).tensor_index.tensors
    names = {name for name, info in tensors.items() if info.dtype}
    assert names == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}


@pytest.mark.parametrize("family", LATENT)
def test_parse_config_first_k_dense_replace_sets_dense_layers(family):
    c = config(family, first_k_dense_replace=2)
    assert [c.has_experts(layer) for layer in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp3", "tp3 does not divide the 8 attention heads. Choose tp from 1, 2, 4, 8."),
        ("pp8", "8 pipeline chunks are more than the model's 4 layers"),
        ("ep3-dp3", "ep3 does not divide the 8 experts"),
    ],
)
def test_shard_map_megatron_indivisible_layout_is_user_error(family, layout, message):
    fitted = Layout.parse(layout)
    with pytest.raises(UserError, match=message):
        weight_table(config(family)).shard_map_megatron(Placement(fitted, tuple(range(fitted.ranks))))


@pytest.mark.parametrize(
    ("family", "changes", "layout", "message"),
    [
        ("llama", {}, "tp8-adp2", "no data-parallel attention for llama"),
        ("gemma2", {}, "pp2", "no pipeline parallelism for gemma2"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "tp2", "this model has dense layers"),
        ("qwen3_next", {}, "pp2", "no pipeline parallelism for qwen3_next"),
        ("qwen3_5_text", {"linear_num_key_heads": 2}, "tp4", "does not divide the 2 key heads of linear attention"),
        ("qwen3", {}, "tp2-ep2", "ep2 distributes experts, but the model has none"),
        ("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 4}, "tp6", "does not divide the 4 key"),
        ("qwen3_moe", {}, "tp4-ep3", "ep must divide tp4"),
        ("gpt_oss", {}, "tp2-ep2", "cannot distribute unquantized experts of gpt_oss. Leave out ep"),
        ("gpt_oss", {"swiglu_alpha": 2.0}, "tp2", "SGLang computes swiglu_alpha=1.702, but this model has 2.0"),
    ],
)
def test_sglang_table_unsupported_layout_is_user_error(family, changes, layout, message):
    with pytest.raises(UserError, match=message):
        weight_table(config(family, **changes)).engine_shards(EngineLayout.parse(layout), 0)


@pytest.mark.parametrize(
    ("family", "changes", "layout", "message"),
    [
        ("qwen3", {}, "tp4-adp2", "vLLM has no data-parallel attention"),
        ("qwen3_moe", {}, "tp4-ep2", r"Write ep4, or leave out ep\."),
        ("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 12}, "tp3", "128 rows, which tp3 does not divide"),
        ("qwen2", {"head_dim": 3}, "tp2", "heads of size hidden_size / num_attention_heads, but this model of size 3"),
        ("gemma2", {"tie_word_embeddings": False}, "tp2", "no output layer besides the embedding"),
        ("glm4_moe", {"first_k_dense_replace": 2}, "pp2", "stage 0 would have dense layers only"),
    ],
)
def test_vllm_table_unsupported_layout_is_user_error(family, changes, layout, message):
    with pytest.raises(UserError, match=message):
        weight_table(config(family, **changes)).for_engine("vllm").engine_shards(EngineLayout.parse(layout), 0)


@given(st.data())
@settings(max_examples=40)
def test_vllm_table_without_pipeline_is_that_of_sglang_but_for_names(data):
    c = data.draw(configs())
    layout = EngineLayout(tp=data.draw(st.sampled_from([1, 2, 4])))
    if (c.architecture == "gemma2" and not c.tied) or (c.architecture == "qwen2" and c.head_dim * c.heads != c.hidden):
        return
    for rank in range(layout.tp):
        sglang, vllm = (weight_table(c).for_engine(name).engine_shards(layout, rank) for name in ("sglang", "vllm"))
        if c.linear:
            softmax = re.compile(r"(\.\d+\.)((?:qkv|o)_proj|[qk]_norm)\.")
            sglang = {softmax.sub(r"\1self_attn.\2.", name): shard for name, shard in sglang.items()}
        renames = {"experts.w": "experts.routed_experts.w", "fused_qkv_a_proj_with_mqa": "fused_qkv_a_proj"}
        if c.architecture == "gpt_oss":
            renames |= {"self_attn.": "attn.", "embed_tokens": "embedding", "_weight_bias": "_bias"}
        renamed = {}
        for name, shard in sglang.items():
            for theirs, ours in renames.items():
                name = name.replace(theirs, ours)
            renamed[name] = shard
        if c.indexer:  # vLLM has keys and weights of heads of an indexer in one projection
            apart, fused = sorted(name for name in renamed if re.search(r"indexer\.w(k|eights_proj)\.", name)), []
            for name in [name for name in vllm if "wk_weights_proj" in name]:
                fused += [piece.tensor for piece in vllm[name].pieces]
                vllm = {other: shard for other, shard in vllm.items() if other != name}
            assert apart and sorted(fused) == [renamed.pop(name).pieces[0].tensor for name in apart]
        assert renamed == dict(vllm)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, f"model_type 'mamba' is not supported. Choose from {', '.join(FAMILIES)}"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"model_type": "mixtral", "sliding_window": 6}, "sliding_window=6 is not supported"),
        ({"hidden_size": None}, "a size is not a number"),
        ({"model_type": "qwen3_moe"}, "field 'num_experts' is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not supported, its frequencies"),
        (fields("deepseek_v2", topk_method="noaux_tc"), "topk_method='noaux_tc' .* Write 'greedy' or 'group_limited"),
        (fields("deepseek_v2", norm_topk_prob=True), "norm_topk_prob=True is not supported for .* 'deepseek_v2'"),
        (fields("deepseek_v3", scoring_func="softmax"), "scoring_func='softmax' .* Write 'sigmoid', or leave it out"),
        (fields("deepseek_v3", n_group=8), "n_group=8 and topk_group=2 are not possible: 8 experts must form groups"),
        (fields("glm4_moe", scoring_func="softmax"), "scoring_func='softmax' .* Write 'sigmoid', or leave it out"),
        (fields("glm4_moe", partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not possible: of the 2 elements"),
        (fields("qwen3_next", layer_types=["mamba"] * 4), "layer_types=.* Write 'linear_attention' or 'full_attent"),
        (fields("qwen3_5_text", linear_num_value_heads=12), "linear_num_value_heads=12 is not a multiple of .*=8"),
        (fields("qwen3_5_text", attn_output_gate=False), "attn_output_gate=False .* Write True, or leave it out"),
        (fields("glm4_moe", tie_word_embeddings=True), "tie_word_embeddings=True .* Write False, or leave it out"),
        (fields("glm4_moe_lite", mlp_layer_types=["dense"] * 2 + ["sparse"] * 2), "other layers .* first_k_dense_repl"),
        (fields("glm4_moe_lite", rope_parameters={"partial_rotary_factor": 0.5}), "0.5 is not .* 'glm4_moe_lite'"),
        (fields("deepseek_v32", index_topk_freq=4), "keys that an earlier layer selected .index_topk_freq"),
        (fields("glm_moe_dsa", indexer_types=["shared", "full"] * 2), "Write .* 'full' for the first"),
        (fields("glm_moe_dsa", indexer_types=["full", "shared"]), "Write 'full' or 'shared' for each of the 4 layers"),
        (fields("glm_moe_dsa", index_topk_pattern="FXSF"), "Write 'full' or 'shared' for each of the 4 layers"),
        (fields("glm_moe_dsa", indexer_rope_interleave=None), "indexer_rope_interleave=None is not that .* Write true"),
        (fields("deepseek_v32", index_head_dim=2), "index_head_dim=2 is below qk_rope_head_dim=4"),
        (fields("deepseek_v32", q_lora_rank=None), "q_lora_rank is missing, which the indexer needs"),
        (fields("deepseek_v32", rope_interleave=False), "rope_interleave=False .* Write True, or leave it out"),
        (fields("minimax_m2", use_qk_norm=False), "use_qk_norm=False is not supported for model_type 'minimax_m2'"),
        (fields("gemma2", use_bidirectional_attention=True), "use_bidirectional_attention=True is not supported"),
        (fields("gemma2", layer_types=["full_attention"]), "layer_types=.* for each of the 4 layers"),
        (fields("gpt_oss", attention_bias=False), "attention_bias=False is not supported for model_type 'gpt_oss'"),
        (fields("gpt_oss", layer_types=["chunked"] * 4), "layer_types=.* for each of the 4 layers"),
    ],
)
def test_parse_config_unsupported_model_is_user_error(change, message):
    raw = fields("llama")
    parse_config(raw)
    with pytest.raises(UserError, match=message):
        parse_config(raw | change)
    del raw["vocab_size"]
    with pytest.raises(UserError, match="field 'vocab_size' is missing"):
        parse_config(raw)


def test_read_config_missing_or_damaged_directory_is_named(tmp_path):
    with pytest.raises(UserError, match="no such model directory"):
        read_config(tmp_path / "nowhere")
    cases = {None: r"config\.json: missing", "{": "not a readable JSON file", "[1]": "a list, not an object"}
    for text, message in cases.items():
        if text:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=message):
            read_config(tmp_path)
