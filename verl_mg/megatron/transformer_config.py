"""What megatron-core builds of a Hugging Face model under a layout: its configuration, and the modules of a layer.

Every family of the weight table can be built and trained.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

from verl_mg.layout import Layout
from verl_mg.megatron.attention import PackedAttention
from verl_mg.megatron.linear import NormedRowParallelLinear
from verl_mg.megatron.mla import MultiLatentAttention, PackedMLA
from verl_mg.megatron.norm import RMSNorm
from verl_mg.megatron.routing import RoutedLayer, Router
from verl_mg.models.hf_config import HFConfig

Fields = dict[str, Any]

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}

# Without Transformer Engine megatron-core has mock objects for its classes, and still asks for instances of them.
multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)


def transformer_config(c: HFConfig, layout: Layout, dtype: torch.dtype, recompute: bool) -> TransformerConfig:
    """megatron-core's configuration of the model under a layout."""
    kind = MLATransformerConfig if c.latent else TransformerConfig
    on_gpu = torch.cuda.is_available()
    return kind(
        **_network(c),
        **_latent_attention(c),
        **_experts(c, layout),
        **_parallelism(c, layout),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Losses come normalised by the whole mini-batch: gradients are summed, never divided again.
        calculate_per_token_loss=True,
        perform_initialization=False,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        use_cpu_initialization=not on_gpu,
        bias_dropout_fusion=on_gpu,
        bias_activation_fusion=on_gpu and c.activation == "silu",
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=adds_gradients_in_kernel(),
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


def adds_gradients_in_kernel() -> bool:
    """Whether Apex's kernel is there, by which a weight's gradient is added to its float32 buffer as it is computed."""
    if not torch.cuda.is_available():
        return False
    try:
        import fused_weight_gradient_mlp_cuda  # noqa: F401
    except ImportError:
        return False
    return True


def block_spec(c: HFConfig, layers: range) -> TransformerBlockSubmodules:
    """The modules of a run of layers, given by their global indices."""
    specs = [_layer_spec(c, layer) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _network(c: HFConfig) -> Fields:
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
    # Checked against variable lengths, without experts too.
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
        "moe_router_pre_softmax": True,  # our router normalises after it, where the model does
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
        "pipeline_model_parallel_layout": _pipeline(c, layout) if layout.pp > 1 else None,
        "sequence_parallel": layout.tp > 1,
        "variable_seq_lengths": layout.pp > 1,
        # With two stages the previous and the next rank are one: batched P2P would mix activations and gradients.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
    }


def _pipeline(c: HFConfig, layout: Layout) -> list[list[str]]:
    """What stands on each chunk, in the order of the layers: megatron-core numbers uneven runs by it."""
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
        parts.mlp.submodules.router = partial(Router, experts=experts)
    if c.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if c.sandwich_norms:
        attention.linear_proj = parts.mlp.submodules.linear_fc2 = NormedRowParallelLinear
    return layer


def _norms_inside_attention(c: HFConfig) -> bool:
    """Of queries and keys, or of what latent attention compresses."""
    return c.qk_norm or c.latent is not None
