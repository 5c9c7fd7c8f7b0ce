"""Table of SGLang: the parameters of the model classes of SGLang 0.5, as their `load_weights` fills them.

Shared experts are a separate layer, as with `--disable-shared-experts-fusion`. Derived tensors (MLA's `w_kc` and
`w_vc`) are not parameters.
"""

from __future__ import annotations

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import HFConfig
from verl_mg.models.hf_tensors import MLP, Experts, GroupedAttention, LatentAttention, LayerSpec, ModelSpec
from verl_mg.sharding.param_spec import (
    Axis,
    HeadRows,
    ParamSpec,
    VocabularyRows,
    optional_param,
    split_columns,
    split_rows,
)

VOCABULARY = VocabularyRows(64, on_each_rank=False)
ATTENTION, FEED_FORWARD = "self_attn.", "mlp."
DATA_PARALLEL_ATTENTION = frozenset({"qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"})
"""Architectures whose attention SGLang can shard on a separate axis (data-parallel attention)."""
OUTPUT_ON_EVERY_STAGE = frozenset({"llama", "mixtral", "qwen3_moe"})
"""Architectures whose model class builds an output layer on every pipeline stage, and uses the last one."""
WITHOUT_PIPELINE = frozenset({"gemma2"})
"""Architectures without pipeline parallelism in SGLang."""
EXPERT_BLOCK = {"mixtral": "block_sparse_moe."}
"""Prefix of the experts where it differs from `mlp.`."""


def check_supported(config: HFConfig, layout: EngineLayout) -> None:
    """Checks that SGLang's model class supports a layout.

    Args:
        config: configuration of the model.
        layout: layout of an engine.

    Raises:
        UserError: for a feature that the class of this architecture does not have.
    """
    if layout.adp > 1 and config.architecture not in DATA_PARALLEL_ATTENTION:
        raise UserError(
            f"rollout.layout={layout}: SGLang has no data-parallel attention for {config.architecture}. Leave out adp."
        )
    if layout.pp > 1 and config.architecture in WITHOUT_PIPELINE:
        raise UserError(
            f"rollout.layout={layout}: SGLang has no pipeline parallelism for {config.architecture}. Leave out pp."
        )
    if config.architecture == "qwen3_moe" and config.experts and len(config.experts.layers) < config.layers:
        raise UserError(
            "rollout.engine=sglang: SGLang builds experts in every layer of qwen3_moe, but this model has dense "
            "layers among them. Use rollout.engine=hf."
        )


def embedding_param(model: ModelSpec) -> ParamSpec:
    """Returns the input embedding."""
    return ParamSpec("model.embed_tokens.weight", (model.embedding,), VOCABULARY, "vocabulary")


def output_params(model: ModelSpec) -> tuple[ParamSpec, ParamSpec]:
    """Returns the final norm and the output layer."""
    return (
        ParamSpec("model.norm.weight", (model.final_norm,)),
        ParamSpec("lm_head.weight", (model.output,), VOCABULARY, "tensor"),
    )


def layer_params(layer: LayerSpec, config: HFConfig) -> tuple[ParamSpec, ...]:
    """Returns the parameters of one transformer layer.

    Args:
        layer: the Hugging Face tensors of the layer.
        config: configuration of the model.
    """
    axis: Axis = "attention" if config.architecture in DATA_PARALLEL_ATTENTION else "tensor"
    mlp_norm = "pre_feedforward_layernorm" if config.sandwich_norms else "post_attention_layernorm"
    return (
        ParamSpec("input_layernorm.weight", (layer.input_norm,)),
        *(
            _grouped_attention(layer.attention, config, axis)
            if isinstance(layer.attention, GroupedAttention)
            else _latent_attention(layer.attention)
        ),
        *optional_param("post_attention_layernorm.weight", layer.after_attention_norm),
        ParamSpec(f"{mlp_norm}.weight", (layer.mlp_norm,)),
        *(_mlp(FEED_FORWARD, layer.mlp) if isinstance(layer.mlp, MLP) else _experts(layer.mlp, config)),
        *optional_param("post_feedforward_layernorm.weight", layer.after_mlp_norm),
    )


def _grouped_attention(a: GroupedAttention, config: HFConfig, axis: Axis) -> tuple[ParamSpec, ...]:
    heads = HeadRows(config.kv_heads)
    params = [
        ParamSpec(ATTENTION + "qkv_proj.weight", (a.q, a.k, a.v), heads, axis),
        ParamSpec(ATTENTION + "o_proj.weight", (a.out,), split_columns, axis),
    ]
    if a.biases:
        params.append(ParamSpec(ATTENTION + "qkv_proj.bias", a.biases, heads, axis))
    for name, norm in zip("qk", a.norms, strict=bool(a.norms)):
        params.append(ParamSpec(f"{ATTENTION}{name}_norm.weight", (norm,)))
    return tuple(params)


def _latent_attention(a: LatentAttention) -> tuple[ParamSpec, ...]:
    params = [
        ParamSpec(ATTENTION + "kv_a_layernorm.weight", (a.kv_norm,)),
        ParamSpec(ATTENTION + "kv_b_proj.weight", (a.kv_up,), split_rows, "attention"),
        ParamSpec(ATTENTION + "o_proj.weight", (a.out,), split_columns, "attention"),
    ]
    if a.q_down is None or a.q_norm is None:
        return (
            ParamSpec(ATTENTION + "q_proj.weight", (a.q,), split_rows, "attention"),
            ParamSpec(ATTENTION + "kv_a_proj_with_mqa.weight", (a.kv_down,)),
            *params,
        )
    return (
        ParamSpec(ATTENTION + "fused_qkv_a_proj_with_mqa.weight", (a.q_down, a.kv_down)),
        ParamSpec(ATTENTION + "q_a_layernorm.weight", (a.q_norm,)),
        ParamSpec(ATTENTION + "q_b_proj.weight", (a.q,), split_rows, "attention"),
        *params,
    )


def _mlp(prefix: str, mlp: MLP) -> tuple[ParamSpec, ...]:
    return (
        ParamSpec(prefix + "gate_up_proj.weight", (mlp.gate, mlp.up), split_rows, "tensor"),
        ParamSpec(prefix + "down_proj.weight", (mlp.down,), split_columns, "tensor"),
    )


def _experts(e: Experts, config: HFConfig) -> tuple[ParamSpec, ...]:
    prefix = EXPERT_BLOCK.get(config.architecture, FEED_FORWARD)
    return (
        ParamSpec(prefix + "gate.weight", (e.router,)),
        *optional_param(prefix + "gate.e_score_correction_bias", e.router_bias),
        ParamSpec(prefix + "experts.w13_weight", (e.each.gate, e.each.up), split_rows, "expert"),
        ParamSpec(prefix + "experts.w2_weight", (e.each.down,), split_columns, "expert"),
        *(_mlp(prefix + "shared_experts.", e.shared) if e.shared else ()),
    )
