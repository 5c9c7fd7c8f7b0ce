"""megatron-core's configuration of a Hugging Face model under a layout, and the modules of its layers.

Every family of the weight table can be built and trained.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

from verl_mg.layout import Layout
from verl_mg.megatron.attention import MultiLatentAttention, PackedAttention, PackedMLA
from verl_mg.megatron.core_version import submodules
from verl_mg.megatron.layers import NormedRowParallelLinear, RMSNorm
from verl_mg.megatron.routing import RoutedLayer, Router
from verl_mg.models.hf_config import HFConfig

Fields = dict[str, Any]
"""Arguments of `TransformerConfig` by name."""

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
"""Activation functions by their names in config.json."""


def transformer_config(c: HFConfig, layout: Layout, dtype: torch.dtype, recompute: bool) -> TransformerConfig:
    """Creates megatron-core's configuration.

    Args:
        c: the model.
        layout: parallel sizes.
        dtype: dtype of the weights.
        recompute: recompute all activations of a layer in the backward pass.
    """
    kind = MLATransformerConfig if c.latent else TransformerConfig
    on_gpu = torch.cuda.is_available()
    return kind(
        **_model_fields(c),
        **_latent_attention(c),
        **_experts(c, layout),
        **_parallelism(c, layout),
        # The modules of `block_spec`, none of Transformer Engine.
        transformer_impl="local",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Losses are normalized over the whole mini-batch: gradients are summed, never divided again.
        calculate_per_token_loss=True,
        perform_initialization=False,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        use_cpu_initialization=not on_gpu,
        bias_dropout_fusion=on_gpu,
        bias_activation_fusion=on_gpu and c.activation == "silu",
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=has_gradient_accumulation_kernel(),
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


def has_gradient_accumulation_kernel() -> bool:
    """Returns whether Apex's kernel is installed, which adds weight gradients to float32 buffers directly."""
    if not torch.cuda.is_available():
        return False
    try:
        import fused_weight_gradient_mlp_cuda  # noqa: F401
    except ImportError:
        return False
    return True


def block_spec(c: HFConfig, layers: range) -> TransformerBlockSubmodules:
    """Returns the modules of consecutive layers.

    Args:
        c: the model.
        layers: global indices of the layers.
    """
    specs = [_layer_spec(c, layer) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _model_fields(c: HFConfig) -> Fields:
    return {
        "num_layers": c.layers,
        "hidden_size": c.hidden,
        "num_attention_heads": c.heads,
        "num_query_groups": c.kv_heads,
        "kv_channels": c.head_dim,
        "ffn_hidden_size": c.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": c.norm_eps,
        "layernorm_zero_centered_gamma": c.zero_centered_norms,
        "softmax_scale": c.attention_scale,
        "qk_layernorm": _norms_inside_attention(c),
        "add_bias_linear": False,
        "add_qkv_bias": c.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": ACTIVATIONS[c.activation],
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _latent_attention(c: HFConfig) -> Fields:
    if c.latent is None:
        return {}
    return {
        "q_lora_rank": c.latent.q_rank or None,
        "kv_lora_rank": c.latent.kv_rank,
        "qk_head_dim": c.latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": c.latent.rope_dim,
        "v_head_dim": c.latent.v_dim,
        "rope_type": "rope",
    }


def _experts(c: HFConfig, layout: Layout) -> Fields:
    # megatron-core checks it against variable lengths, even without experts.
    dispatcher = {"moe_token_dispatcher_type": "alltoall"}
    if c.experts is None:
        return dispatcher
    return dispatcher | {
        "num_moe_experts": c.experts.count,
        "moe_ffn_hidden_size": c.experts.ffn,
        "moe_shared_expert_intermediate_size": c.experts.shared_ffn or None,
        "moe_layer_freq": [int(c.has_experts(layer)) for layer in range(c.layers)],
        "moe_router_topk": c.experts.top_k,
        "moe_router_dtype": "fp32" if c.experts.float32 else None,
        "moe_router_pre_softmax": True,  # our router normalizes after the softmax where the model does
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def _parallelism(c: HFConfig, layout: Layout) -> Fields:
    return {
        "tensor_model_parallel_size": layout.tp,
        "context_parallel_size": layout.cp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "pipeline_model_parallel_layout": _pipeline_layout(c, layout) if layout.pp > 1 else None,
        "sequence_parallel": layout.tp > 1,
        "variable_seq_lengths": layout.pp > 1,
        # With two stages the previous and the next rank are the same: batched P2P would mix activations and gradients.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
    }


def _pipeline_layout(c: HFConfig, layout: Layout) -> list[list[str]]:
    """Returns the modules of each chunk in the order of the layers, by which megatron-core numbers uneven stages."""
    chunks = [
        ["decoder"] * len(layout.layers(c.layers, stage, chunk))
        for chunk in range(layout.vpp)
        for stage in range(layout.pp)
    ]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def _layer_spec(c: HFConfig, number: int) -> ModuleSpec:
    experts = c.experts if c.has_experts(number) else None
    layer: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=experts.count if experts else None,
        qk_layernorm=_norms_inside_attention(c),
        multi_latent_attention=c.latent is not None,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    if c.latent:
        parts.self_attention.module = MultiLatentAttention
        attention.core_attention = ModuleSpec(PackedMLA, {"interleaved": c.latent.interleaved})
        attention.q_layernorm = attention.kv_layernorm = RMSNorm
    else:
        options = {"window": c.window(number), "softcap": c.attention_softcap}
        attention.core_attention = ModuleSpec(PackedAttention, options)
    if experts:
        layer.module = RoutedLayer
        submodules(parts.mlp).router = partial(Router, experts=experts)
    if c.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if c.sandwich_norms:
        attention.linear_proj = submodules(parts.mlp).linear_fc2 = NormedRowParallelLinear
    return layer


def _norms_inside_attention(c: HFConfig) -> bool:
    """Returns whether attention has norms: of queries and keys, or of the latents of latent attention."""
    return c.qk_norm or c.latent is not None
