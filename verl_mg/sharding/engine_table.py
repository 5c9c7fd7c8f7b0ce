"""Table of the rollout engines: the parameters of the model classes of SGLang 0.5 and vLLM 0.32, as their
`load_weights` fills them.

Both have the same names, fusions and shards. What differs is in `EngineRules`: two names, the parameters at the ends of
the pipeline, and which layouts are supported. `sglang` and `vllm` have the rules of each. Shared experts are a separate
layer, as with SGLang's `--disable-shared-experts-fusion`. Derived tensors (MLA's `w_kc` and `w_vc` in SGLang, `W_UK_T`
and `W_UV` in vLLM) are not parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import HFConfig
from verl_mg.models.hf_tensors import LAYER
from verl_mg.models.tensor_tree import (
    MLP,
    Experts,
    GroupedAttention,
    LatentAttention,
    LayerSpec,
    LinearAttention,
    ModelSpec,
    MultiTokenSpec,
)
from verl_mg.sharding import attention
from verl_mg.sharding.attention import indexer_params
from verl_mg.sharding.param_spec import (
    Axis,
    HeadRows,
    ParamRow,
    VocabularyRows,
    on_first_rank,
    optional_param,
    split_columns,
    split_rows,
)

VOCABULARY = VocabularyRows(64, on_each_rank=False)  # as the engines' VocabParallelEmbedding pads it
ATTENTION, LINEAR_ATTENTION, FEED_FORWARD = "self_attn.", "linear_attn.", "mlp."
"""Prefixes of attention, of linear attention, and of the feed-forward layer or experts in a layer."""
DATA_PARALLEL_ATTENTION = frozenset({
    *("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "minimax_m2"),
})  # fmt: skip
"""Architectures whose attention SGLang can shard on a separate axis (data-parallel attention)."""
DRAFT = "draft."
"""Prefix of the parameters of an engine's draft model, a separate model class that the engine drafts tokens with."""
WHOLE_EMBEDDING = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
"""Architectures whose embedding is whole on every rank with data-parallel attention."""
EXPERT_BLOCK = dict.fromkeys(("mixtral", "minimax_m2"), "block_sparse_moe.")
"""Prefix of the experts where it differs from `mlp.`."""
ROUTER = {"gpt_oss": "router"}  # name of the router in the block of experts where it differs from `gate`


@dataclass(frozen=True)
class PipelineEnds:
    """Parameters outside the layers that a pipeline stage has."""

    embedding: bool  # whether it has the input embedding
    final_norm: bool  # whether it has the norm after the last layer
    output: bool  # whether it has an output layer besides the embedding


@dataclass(frozen=True)
class EngineRules:
    """Differences of an engine from the common table."""

    name: str  # name of the engine in messages
    experts: str  # prefix of the stacked experts in a layer's block of experts
    expert_bias: str  # end of the name of the stacked experts' biases, after `w13_` and `w2_`
    attention: Mapping[str, str]
    """Prefix of grouped-query attention in the model class of an architecture where it differs from `self_attn.`."""
    embedding: Mapping[str, str]
    """Name of the input embedding in the model class of an architecture where it differs from `embed_tokens`."""
    fused_indexer: bool  # whether an indexer's keys and head weights are one projection
    latent_down: str  # name of the fused down-projections of queries, keys and values of latent attention
    check_supported: Callable[[HFConfig, EngineLayout], None]
    """Raises a UserError for a layout that the model class of this architecture does not support."""
    pipeline_ends: Callable[[HFConfig, bool, bool, bool], PipelineEnds]
    """(configuration, is the output layer tied, is it the first stage, is it the last) -> what the stage has."""


def embedding_param(model: ModelSpec, config: HFConfig, rules: EngineRules, layout: EngineLayout) -> ParamRow:
    """Returns the input embedding, which some classes of SGLang replicate with data-parallel attention."""
    name = rules.embedding.get(config.architecture, "embed_tokens")
    whole = layout.adp > 1 and config.architecture in WHOLE_EMBEDDING
    return ParamRow(f"model.{name}.weight", (model.embedding,), VOCABULARY, "replicated" if whole else "vocabulary")


def output_params(model: ModelSpec) -> tuple[ParamRow, ParamRow]:
    """Returns the final norm and the output layer."""
    return (
        ParamRow("model.norm.weight", (model.final_norm,)),
        ParamRow("lm_head.weight", (model.output,), VOCABULARY, "tensor"),
    )


def draft_params(m: MultiTokenSpec, config: HFConfig) -> tuple[ParamRow, ...]:
    """Returns what a draft model has besides its transformer layer, without what it shares with the policy."""
    names = ("model.enorm", "model.hnorm", "model.eh_proj", "model.shared_head.norm")
    if config.linear:
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "model.norm")
    tensors = (m.embedding_norm, m.hidden_norm, m.projection, m.final_norm)
    return tuple(ParamRow(f"{name}.weight", (tensor,)) for name, tensor in zip(names, tensors, strict=True))


def draft_layer(config: HFConfig) -> str:
    """Returns the prefix of the transformer layer of a draft model."""
    return "model.layers.0." if config.linear else "model.decoder."


def layer_params(layer: LayerSpec, config: HFConfig, rules: EngineRules) -> tuple[ParamRow, ...]:
    """Returns the parameters of one transformer layer."""
    axis: Axis = "attention" if config.architecture in DATA_PARALLEL_ATTENTION else "tensor"
    mlp_norm = "pre_feedforward_layernorm" if config.sandwich_norms else "post_attention_layernorm"
    return (
        ParamRow("input_layernorm.weight", (layer.input_norm,)),
        *_attention(layer, config, rules, axis),
        *optional_param("post_attention_layernorm.weight", layer.after_attention_norm),
        ParamRow(f"{mlp_norm}.weight", (layer.mlp_norm,)),
        *(_mlp(FEED_FORWARD, layer.mlp) if isinstance(layer.mlp, MLP) else _experts(layer.mlp, config, rules)),
        *optional_param("post_feedforward_layernorm.weight", layer.after_mlp_norm),
    )


def _attention(layer: LayerSpec, config: HFConfig, rules: EngineRules, axis: Axis) -> tuple[ParamRow, ...]:
    if isinstance(layer.attention, LatentAttention):
        return _latent_attention(layer.attention, rules)
    if isinstance(layer.attention, LinearAttention):
        return _linear_attention(layer.attention, config, axis)
    return _grouped_attention(layer.attention, config, rules, axis)


def _grouped_attention(a: GroupedAttention, config: HFConfig, rules: EngineRules, axis: Axis) -> tuple[ParamRow, ...]:
    heads, prefix = HeadRows(config.kv_heads), rules.attention.get(config.architecture, ATTENTION)
    params = [
        ParamRow(prefix + "qkv_proj.weight", (a.q, a.k, a.v), heads, axis),
        ParamRow(prefix + "o_proj.weight", (a.out,), split_columns, axis),
    ]
    if a.biases:
        params.append(ParamRow(prefix + "qkv_proj.bias", a.biases, heads, axis))
    params += optional_param(prefix + "o_proj.bias", a.out_bias)
    params += optional_param(prefix + "sinks", a.sinks, split_rows, axis)
    for name, norm in zip("qk", a.norms, strict=bool(a.norms)):
        parameter = f"{prefix}{name}_norm.weight"
        joint = ParamRow(parameter, (norm,), HeadRows(config.kv_heads, int(name == "q")), axis)
        params.append(joint if config.joint_qk_norm else ParamRow(parameter, (norm,)))
    return tuple(params)


def _linear_attention(a: LinearAttention, config: HFConfig, axis: Axis) -> tuple[ParamRow, ...]:
    assert config.linear
    linear = config.linear
    # The engines' modules compute with the checkpoint's order of rows: where that is by key head, a rank has a run.
    qkvz = split_rows if linear.by_key_head else attention.qkvz(linear)
    ba = split_rows if linear.by_key_head else attention.ba(linear)
    return (
        ParamRow(LINEAR_ATTENTION + "in_proj_qkvz.weight", a.qkvz, qkvz, axis),
        ParamRow(LINEAR_ATTENTION + "in_proj_ba.weight", a.ba, ba, axis),
        ParamRow(LINEAR_ATTENTION + "conv1d.weight", (a.conv,), attention.convolved(linear), axis),
        ParamRow(LINEAR_ATTENTION + "dt_bias", (a.dt_bias,), split_rows, axis),
        ParamRow(LINEAR_ATTENTION + "A_log", (a.a_log,), split_rows, axis),
        ParamRow(LINEAR_ATTENTION + "norm.weight", (a.norm,)),
        ParamRow(LINEAR_ATTENTION + "out_proj.weight", (a.out,), split_columns, axis),
    )


def _latent_attention(a: LatentAttention, rules: EngineRules) -> tuple[ParamRow, ...]:
    params = [
        ParamRow(ATTENTION + "kv_a_layernorm.weight", (a.kv_norm,)),
        ParamRow(ATTENTION + "kv_b_proj.weight", (a.kv_up,), split_rows, "attention"),
        ParamRow(ATTENTION + "o_proj.weight", (a.out,), split_columns, "attention"),
    ]
    if a.indexer:
        params += indexer_params(ATTENTION + "indexer.", a.indexer, rules.fused_indexer)
    if a.q_down is None or a.q_norm is None:
        return (
            ParamRow(ATTENTION + "q_proj.weight", (a.q,), split_rows, "attention"),
            ParamRow(ATTENTION + "kv_a_proj_with_mqa.weight", (a.kv_down,)),
            *params,
        )
    return (
        ParamRow(f"{ATTENTION}{rules.latent_down}.weight", (a.q_down, a.kv_down)),
        ParamRow(ATTENTION + "q_a_layernorm.weight", (a.q_norm,)),
        ParamRow(ATTENTION + "q_b_proj.weight", (a.q,), split_rows, "attention"),
        *params,
    )


def _mlp(prefix: str, mlp: MLP) -> tuple[ParamRow, ...]:
    return (
        ParamRow(prefix + "gate_up_proj.weight", mlp.gate_up, split_rows, "tensor"),
        ParamRow(prefix + "down_proj.weight", (mlp.down,), split_columns, "tensor"),
    )


def _experts(e: Experts, config: HFConfig, rules: EngineRules) -> tuple[ParamRow, ...]:
    prefix = EXPERT_BLOCK.get(config.architecture, FEED_FORWARD)
    stacked, router = prefix + rules.experts, prefix + ROUTER.get(config.architecture, "gate")
    shared = "shared_expert" if e.shared_gate else "shared_experts"
    bias = e.router_bias  # keeps the checkpoint's name in the model classes of both engines
    return (
        ParamRow(router + ".weight", (e.router,)),
        *((ParamRow(bias.name.removeprefix(LAYER), (bias,)),) if bias else ()),
        *optional_param(router + ".bias", e.logit_bias),
        ParamRow(stacked + "w13_weight", e.each.gate_up, split_rows, "expert"),
        *optional_param(f"{stacked}w13_{rules.expert_bias}", e.each.gate_up_bias, split_rows, "expert"),
        ParamRow(stacked + "w2_weight", (e.each.down,), split_columns, "expert"),
        # The engines sum the outputs of the ranks of an expert, so a bias on each would count several times.
        *optional_param(f"{stacked}w2_{rules.expert_bias}", e.each.down_bias, on_first_rank, "expert"),
        *(_mlp(f"{prefix}{shared}.", e.shared) if e.shared else ()),
        *optional_param(f"{prefix}{shared}_gate.weight", e.shared_gate),
    )
