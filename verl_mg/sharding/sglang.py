"""SGLang's dialect: the parameters of the model classes of SGLang 0.5, as its `load_weights` fills them.

Shared experts are a layer of their own, as with `--disable-shared-experts-fusion`. Derived tensors (MLA's `w_kc`,
`w_vc`) are not parameters.
"""

from __future__ import annotations

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import HFConfig
from verl_mg.models.hf_tensors import MLP, Experts, GroupedAttention, LatentAttention, LayerSpec, ModelSpec, TensorSpec
from verl_mg.sharding.param_spec import Axis, ParamSpec
from verl_mg.sharding.shard_rules import HeadRows, VocabularyRows, columns, rows

VOCABULARY = VocabularyRows(64, on_each_rank=False)
ATTENTION, FEED_FORWARD = "self_attn.", "mlp."
# Families whose attention SGLang can cut by an axis of its own (data-parallel attention).
DATA_PARALLEL_ATTENTION = frozenset({"qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3"})
# Families whose model class builds an output layer on every stage of a pipeline, and uses the last one.
OUTPUT_ON_EVERY_STAGE = frozenset({"llama", "mixtral", "qwen3_moe"})
WITHOUT_PIPELINE = frozenset({"gemma2"})
MIXTURE = {"mixtral": "block_sparse_moe."}


def check(c: HFConfig, layout: EngineLayout) -> None:
    """UserError for what SGLang's model class of this family does not do."""
    if layout.adp > 1 and c.architecture not in DATA_PARALLEL_ATTENTION:
        raise UserError(f"rollout layout {layout}: SGLang has no data-parallel attention for {c.architecture}")
    if layout.pp > 1 and c.architecture in WITHOUT_PIPELINE:
        raise UserError(f"rollout layout {layout}: SGLang has no pipeline parallelism for {c.architecture}")
    if c.architecture == "qwen3_moe" and c.experts and len(c.experts.layers) < c.layers:
        raise UserError("SGLang gives experts to every layer of qwen3_moe, and this model has dense ones among them")


def embedding(model: ModelSpec) -> ParamSpec:
    """The input embedding."""
    return ParamSpec("model.embed_tokens.weight", (model.embedding,), VOCABULARY, "vocabulary")


def head(model: ModelSpec) -> tuple[ParamSpec, ...]:
    """What stands behind the layers."""
    return (
        ParamSpec("model.norm.weight", (model.final_norm,)),
        ParamSpec("lm_head.weight", (model.output,), VOCABULARY, "tensor"),
    )


def block(b: LayerSpec, c: HFConfig) -> tuple[ParamSpec, ...]:
    """The parameters of one layer."""
    axis: Axis = "attention" if c.architecture in DATA_PARALLEL_ATTENTION else "tensor"
    attention = _grouped(b.attention, c, axis) if isinstance(b.attention, GroupedAttention) else _latent(b.attention)
    mlp_norm = "pre_feedforward_layernorm" if c.sandwich_norms else "post_attention_layernorm"
    return (
        ParamSpec("input_layernorm.weight", (b.input_norm,)),
        *attention,
        *_optional("post_attention_layernorm.weight", b.after_attention_norm),
        ParamSpec(f"{mlp_norm}.weight", (b.mlp_norm,)),
        *(_mlp(FEED_FORWARD, b.mlp) if isinstance(b.mlp, MLP) else _mixture(b.mlp, c)),
        *_optional("post_feedforward_layernorm.weight", b.after_mlp_norm),
    )


def _grouped(a: GroupedAttention, c: HFConfig, axis: Axis) -> tuple[ParamSpec, ...]:
    heads = HeadRows(c.kv_heads)
    weights = [
        ParamSpec(ATTENTION + "qkv_proj.weight", (a.q, a.k, a.v), heads, axis),
        ParamSpec(ATTENTION + "o_proj.weight", (a.out,), columns, axis),
    ]
    if a.biases:
        weights.append(ParamSpec(ATTENTION + "qkv_proj.bias", a.biases, heads, axis))
    for name, norm in zip("qk", a.norms, strict=bool(a.norms)):
        weights.append(ParamSpec(f"{ATTENTION}{name}_norm.weight", (norm,)))
    return tuple(weights)


def _latent(a: LatentAttention) -> tuple[ParamSpec, ...]:
    weights = [
        ParamSpec(ATTENTION + "kv_a_layernorm.weight", (a.kv_norm,)),
        ParamSpec(ATTENTION + "kv_b_proj.weight", (a.kv_up,), rows, "attention"),
        ParamSpec(ATTENTION + "o_proj.weight", (a.out,), columns, "attention"),
    ]
    if a.q_down is None or a.q_norm is None:
        return (
            ParamSpec(ATTENTION + "q_proj.weight", (a.q,), rows, "attention"),
            ParamSpec(ATTENTION + "kv_a_proj_with_mqa.weight", (a.kv_down,)),
            *weights,
        )
    return (
        ParamSpec(ATTENTION + "fused_qkv_a_proj_with_mqa.weight", (a.q_down, a.kv_down)),
        ParamSpec(ATTENTION + "q_a_layernorm.weight", (a.q_norm,)),
        ParamSpec(ATTENTION + "q_b_proj.weight", (a.q,), rows, "attention"),
        *weights,
    )


def _mlp(prefix: str, mlp: MLP) -> tuple[ParamSpec, ...]:
    return (
        ParamSpec(prefix + "gate_up_proj.weight", (mlp.gate, mlp.up), rows, "tensor"),
        ParamSpec(prefix + "down_proj.weight", (mlp.down,), columns, "tensor"),
    )


def _mixture(e: Experts, c: HFConfig) -> tuple[ParamSpec, ...]:
    prefix = MIXTURE.get(c.architecture, FEED_FORWARD)
    return (
        ParamSpec(prefix + "gate.weight", (e.router,)),
        *_optional(prefix + "gate.e_score_correction_bias", e.router_bias),
        ParamSpec(prefix + "experts.w13_weight", (e.each.gate, e.each.up), rows, "expert"),
        ParamSpec(prefix + "experts.w2_weight", (e.each.down,), columns, "expert"),
        *(_mlp(prefix + "shared_experts.", e.shared) if e.shared else ()),
    )


def _optional(name: str, tensor: TensorSpec | None) -> tuple[ParamSpec, ...]:
    return (ParamSpec(name, (tensor,)),) if tensor else ()
