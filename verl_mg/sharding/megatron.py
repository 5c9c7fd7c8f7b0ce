"""Megatron's dialect: the parameters of `megatron.core.models.gpt.GPTModel`.

Two sets of names: those of its local modules, and those of Transformer Engine's, which fuse a norm into the
linear layer behind it, group the experts of a rank, and do not cut the low-rank projections of MLA.
Gemma 2's norms behind a linear layer are named as its own (`linear_proj.post_layernorm`).
"""

from __future__ import annotations

from typing import Literal

from verl_mg.models.hf_config import HFConfig
from verl_mg.models.hf_tensors import MLP, Experts, GroupedAttention, LatentAttention, LayerSpec, ModelSpec, TensorSpec
from verl_mg.sharding.param_spec import ParamSpec
from verl_mg.sharding.shard_rules import FusedRows, VocabularyRows, columns, rows

Modules = Literal["local", "transformer_engine"]
VOCABULARY = VocabularyRows(8)  # rows of a shard come in eights, which the matrix units of GPUs want


def embedding(model: ModelSpec) -> ParamSpec:
    """The input embedding, on the first stage."""
    return ParamSpec("embedding.word_embeddings.weight", (model.embedding,), VOCABULARY, "vocabulary")


def head(model: ModelSpec) -> tuple[ParamSpec, ...]:
    """What stands behind the layers, on the last stage."""
    return (
        ParamSpec("decoder.final_layernorm.weight", (model.final_norm,)),
        ParamSpec("output_layer.weight", (model.output,), VOCABULARY, "vocabulary"),
    )


def block(b: LayerSpec, c: HFConfig, modules: Modules) -> tuple[ParamSpec, ...]:
    """The parameters of one layer."""
    fused = modules == "transformer_engine"
    if isinstance(b.attention, GroupedAttention):
        attention = _grouped(b.attention, c)
        input_norm = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
    else:
        attention = _latent(b.attention, fused)
        input_norm = "input_layernorm.weight"
    dense = isinstance(b.mlp, MLP)
    mlp_norm = "mlp.linear_fc1.layer_norm_weight" if fused and dense else "pre_mlp_layernorm.weight"
    return (
        ParamSpec(input_norm, (b.input_norm,)),
        *attention,
        *_optional("self_attention.linear_proj.post_layernorm.weight", b.after_attention_norm),
        ParamSpec(mlp_norm, (b.mlp_norm,)),
        *(_mlp("mlp.", b.mlp) if isinstance(b.mlp, MLP) else _mixture(b.mlp, fused)),
        *_optional("mlp.linear_fc2.post_layernorm.weight", b.after_mlp_norm),
    )


def _grouped(a: GroupedAttention, c: HFConfig) -> tuple[ParamSpec, ...]:
    by_query_group = FusedRows(c.kv_heads)
    weights = [
        ParamSpec("self_attention.linear_qkv.weight", (a.q, a.k, a.v), by_query_group, "tensor"),
        ParamSpec("self_attention.linear_proj.weight", (a.out,), columns, "tensor"),
    ]
    if a.biases:
        weights.append(ParamSpec("self_attention.linear_qkv.bias", a.biases, by_query_group, "tensor"))
    for name, norm in zip("qk", a.norms, strict=bool(a.norms)):
        weights.append(ParamSpec(f"self_attention.{name}_layernorm.weight", (norm,)))
    return tuple(weights)


def _latent(a: LatentAttention, fused: bool) -> tuple[ParamSpec, ...]:
    def down(name: str, tensor: TensorSpec) -> ParamSpec:
        return ParamSpec(name, (tensor,)) if fused else ParamSpec(name, (tensor,), rows, "tensor")

    weights = [
        down("self_attention.linear_kv_down_proj.weight", a.kv_down),
        ParamSpec("self_attention.linear_kv_up_proj.weight", (a.kv_up,), rows, "tensor"),
        ParamSpec(
            "self_attention.linear_kv_up_proj.layer_norm_weight" if fused else "self_attention.kv_layernorm.weight",
            (a.kv_norm,),
        ),
        ParamSpec("self_attention.linear_proj.weight", (a.out,), columns, "tensor"),
    ]
    if a.q_down is None or a.q_norm is None:
        return (ParamSpec("self_attention.linear_q_proj.weight", (a.q,), rows, "tensor"), *weights)
    q_norm = "self_attention.linear_q_up_proj.layer_norm_weight" if fused else "self_attention.q_layernorm.weight"
    return (
        down("self_attention.linear_q_down_proj.weight", a.q_down),
        ParamSpec("self_attention.linear_q_up_proj.weight", (a.q,), rows, "tensor"),
        ParamSpec(q_norm, (a.q_norm,)),
        *weights,
    )


def _mlp(prefix: str, mlp: MLP) -> tuple[ParamSpec, ...]:
    return (
        ParamSpec(prefix + "linear_fc1.weight", (mlp.gate, mlp.up), rows, "tensor"),
        ParamSpec(prefix + "linear_fc2.weight", (mlp.down,), columns, "tensor"),
    )


def _mixture(e: Experts, fused: bool) -> tuple[ParamSpec, ...]:
    each = "mlp.experts.{}.weight{{expert}}" if fused else "mlp.experts.local_experts.{{expert}}.{}.weight"
    return (
        ParamSpec("mlp.router.weight", (e.router,)),
        *_optional("mlp.router.expert_bias", e.router_bias),
        ParamSpec(each.format("linear_fc1"), (e.each.gate, e.each.up), rows, "expert"),
        ParamSpec(each.format("linear_fc2"), (e.each.down,), columns, "expert"),
        *(_mlp("mlp.shared_experts.", e.shared) if e.shared else ()),
    )


def _optional(name: str, tensor: TensorSpec | None) -> tuple[ParamSpec, ...]:
    return (ParamSpec(name, (tensor,)),) if tensor else ()
