"""Table of Megatron: the parameters of `megatron.core.models.gpt.GPTModel`.

There are two sets of names:

- torch: the modules of megatron-core's local specification, and `GroupedExperts`, which stacks the experts of a rank.
- transformer_engine: Transformer Engine's modules, which fuse a norm into the following linear layer, have one
  parameter for each expert, and replicate the low-rank projections of MLA.

The norms of Gemma 2 after a linear layer have names of our model class (`linear_proj.post_layernorm`). gpt-oss has
torch's kernels only; its attention sinks have megatron-core's name (`core_attention.softmax_offset`).
"""

from __future__ import annotations

from typing import Literal

from verl_mg.models.hf_config import HFConfig
from verl_mg.models.tensor_tree import (
    MLP,
    Experts,
    GroupedAttention,
    LatentAttention,
    LayerSpec,
    LinearAttention,
    ModelSpec,
    MultiTokenSpec,
    TensorSpec,
)
from verl_mg.sharding import attention
from verl_mg.sharding.attention import indexer_params
from verl_mg.sharding.param_spec import (
    FusedRows,
    ParamRow,
    Section,
    SectionRows,
    ShardRule,
    VocabularyRows,
    optional_param,
    replicate,
    split_columns,
    split_rows,
)

Kernels = Literal["torch", "transformer_engine"]
"""Kernels of the layers, which decide on their modules and the names of the parameters; `model.kernels` resolved."""
MULTI_TOKEN = "multi_token."  # prefix of the parameters of the layer of multi-token prediction in the last chunk
VOCABULARY = VocabularyRows(8)  # a multiple of 8 rows for each shard, which suits the matrix units of GPUs


def embedding_param(model: ModelSpec) -> ParamRow:
    """Returns the input embedding, which is on the first stage."""
    return ParamRow("embedding.word_embeddings.weight", (model.embedding,), VOCABULARY, "vocabulary")


def output_params(model: ModelSpec) -> tuple[ParamRow, ParamRow]:
    """Returns the final norm and the output layer, which are on the last stage."""
    return (
        ParamRow("decoder.final_layernorm.weight", (model.final_norm,)),
        ParamRow("output_layer.weight", (model.output,), VOCABULARY, "vocabulary"),
    )


def multi_token_params(m: MultiTokenSpec) -> tuple[ParamRow, ...]:
    """Returns what a layer of multi-token prediction has besides a transformer layer; it is on the last stage."""
    # Its projection is whole on every rank, which applies it to its own tokens.
    return (
        ParamRow("enorm.weight", (m.embedding_norm,)),
        ParamRow("hnorm.weight", (m.hidden_norm,)),
        ParamRow("eh_proj.weight", (m.projection,)),
        ParamRow("final_layernorm.weight", (m.final_norm,)),
    )


def layer_params(layer: LayerSpec, config: HFConfig, kernels: Kernels) -> tuple[ParamRow, ...]:
    """Returns the parameters of one transformer layer, under the names that they have with these kernels."""
    fused = kernels == "transformer_engine"
    if isinstance(layer.attention, GroupedAttention):
        attention = _grouped_attention(layer.attention, config)
        input_norm = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
    elif isinstance(layer.attention, LinearAttention):
        attention = _linear_attention(layer.attention, config)
        input_norm = "self_attention.in_proj.layer_norm_weight" if fused else "input_layernorm.weight"
    else:
        attention = _latent_attention(layer.attention, fused)
        input_norm = "input_layernorm.weight"
    dense = isinstance(layer.mlp, MLP)
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if fused and dense else "pre_mlp_layernorm.weight"
    return (
        ParamRow(input_norm, (layer.input_norm,)),
        *attention,
        *optional_param("self_attention.linear_proj.post_layernorm.weight", layer.after_attention_norm),
        ParamRow(mlp_norm, (layer.mlp_norm,)),
        *(_mlp("mlp.", layer.mlp) if isinstance(layer.mlp, MLP) else _experts(layer.mlp, fused)),
        *optional_param("mlp.linear_fc2.post_layernorm.weight", layer.after_mlp_norm),
    )


def _grouped_attention(a: GroupedAttention, config: HFConfig) -> tuple[ParamRow, ...]:
    # The fused QKV weight has queries, key and value of one query group after the other.
    by_query_group = FusedRows(config.kv_heads)
    with_gate = _gated_query_groups(config) if config.output_gate else by_query_group
    params = [
        ParamRow("self_attention.linear_qkv.weight", (a.q, a.k, a.v), with_gate, "tensor"),
        ParamRow("self_attention.linear_proj.weight", (a.out,), split_columns, "tensor"),
    ]
    if a.biases:
        params.append(ParamRow("self_attention.linear_qkv.bias", a.biases, by_query_group, "tensor"))
    params += optional_param("self_attention.linear_proj.bias", a.out_bias)  # whole: added after the sum over ranks
    params += optional_param("self_attention.core_attention.softmax_offset", a.sinks, split_rows, "tensor")
    for name, norm in zip("qk", a.norms, strict=bool(a.norms)):
        parameter = f"self_attention.{name}_layernorm.weight"
        # A norm over all heads together (MiniMax-M2) has a weight for each of their elements, which is cut with them.
        joint = ParamRow(parameter, (norm,), split_rows, "tensor")
        params.append(joint if config.joint_qk_norm else ParamRow(parameter, (norm,)))
    return tuple(params)


def _gated_query_groups(config: HFConfig) -> ShardRule:
    """Returns the rule of a query group with output gates: queries of its heads, gates of its heads, key, value."""
    heads, width = config.heads // config.kv_heads, config.head_dim
    # q_proj has query and gate of one head after the other; in the fused QKV a group's queries precede its gates.
    query = [Section(0, 2 * head * width, width, 2 * heads * width) for head in range(heads)]
    gate = [Section(0, (2 * head + 1) * width, width, 2 * heads * width) for head in range(heads)]
    key_value = [Section(tensor, 0, width, width) for tensor in (1, 2)]
    return SectionRows(config.kv_heads, (*query, *gate, *key_value), unit_major=True)


def _linear_attention(a: LinearAttention, config: HFConfig) -> tuple[ParamRow, ...]:
    assert config.linear
    inputs, convolved = attention.inputs(config.linear), attention.convolved(config.linear)
    return (
        ParamRow("self_attention.in_proj.weight", (*a.qkvz, *a.ba), inputs, "tensor"),
        ParamRow("self_attention.conv1d.weight", (a.conv,), convolved, "tensor"),
        ParamRow("self_attention.dt_bias", (a.dt_bias,), split_rows, "tensor"),
        ParamRow("self_attention.A_log", (a.a_log,), split_rows, "tensor"),
        ParamRow("self_attention.out_norm.weight", (a.norm,)),
        ParamRow("self_attention.out_proj.weight", (a.out,), split_columns, "tensor"),
    )


def _latent_attention(a: LatentAttention, fused: bool) -> tuple[ParamRow, ...]:
    def down(name: str, tensor: TensorSpec) -> ParamRow:
        # Transformer Engine replicates the low-rank projections, the local specification splits their rows.
        return ParamRow(name, (tensor,)) if fused else ParamRow(name, (tensor,), split_rows, "tensor")

    params = [
        down("self_attention.linear_kv_down_proj.weight", a.kv_down),
        ParamRow("self_attention.linear_kv_up_proj.weight", (a.kv_up,), split_rows, "tensor"),
        ParamRow(
            "self_attention.linear_kv_up_proj.layer_norm_weight" if fused else "self_attention.kv_layernorm.weight",
            (a.kv_norm,),
        ),
        ParamRow("self_attention.linear_proj.weight", (a.out,), split_columns, "tensor"),
    ]
    if a.indexer:
        params += indexer_params("self_attention.indexer.", a.indexer)
    if a.q_down is None or a.q_norm is None:
        return (ParamRow("self_attention.linear_q_proj.weight", (a.q,), split_rows, "tensor"), *params)
    q_norm = "self_attention.linear_q_up_proj.layer_norm_weight" if fused else "self_attention.q_layernorm.weight"
    return (
        down("self_attention.linear_q_down_proj.weight", a.q_down),
        ParamRow("self_attention.linear_q_up_proj.weight", (a.q,), split_rows, "tensor"),
        ParamRow(q_norm, (a.q_norm,)),
        *params,
    )


def _mlp(prefix: str, mlp: MLP) -> tuple[ParamRow, ...]:
    return (
        ParamRow(prefix + "linear_fc1.weight", mlp.gate_up, split_rows, "tensor"),
        ParamRow(prefix + "linear_fc2.weight", (mlp.down,), split_columns, "tensor"),
    )


def _experts(e: Experts, fused: bool) -> tuple[ParamRow, ...]:
    # gate_up is one tensor for gpt-oss, whose rows alternate: a run of its rows has gates and ups in pairs.
    each = "mlp.experts.{}.weight{{expert}}" if fused else "mlp.experts.{}.weight"
    return (
        ParamRow("mlp.router.weight", (e.router,)),
        *optional_param("mlp.router.expert_bias", e.router_bias),
        *optional_param("mlp.router.bias", e.logit_bias),
        ParamRow(each.format("linear_fc1"), e.each.gate_up, split_rows, "expert"),
        *optional_param("mlp.experts.linear_fc1.bias", e.each.gate_up_bias, split_rows, "expert"),
        ParamRow(each.format("linear_fc2"), (e.each.down,), split_columns, "expert"),
        # Whole on every rank of the axis: only the first adds it, and each has its whole gradient.
        *optional_param("mlp.experts.linear_fc2.bias", e.each.down_bias, replicate, "expert"),
        *(_mlp("mlp.shared_experts.", e.shared) if e.shared else ()),
        *optional_param("mlp.shared_experts.gate_weight", e.shared_gate),
    )
