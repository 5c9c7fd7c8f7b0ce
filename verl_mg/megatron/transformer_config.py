"""megatron-core's configuration of a Hugging Face model under a layout, and the modules of its layers.

Every family of the weight table can be built and trained.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fp4_utils import get_fp4_align_size
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

from verl_mg.choice import Choice
from verl_mg.config import MegatronConfig, Recompute
from verl_mg.errors import UserError
from verl_mg.layout import Layout
from verl_mg.megatron.attention import PackedAttention
from verl_mg.megatron.config_fields import TRANSFORMER, build_config, check_values, given_fields
from verl_mg.megatron.core_version import submodules
from verl_mg.megatron.experts import ExpertsLayer, GroupedExperts
from verl_mg.megatron.latent_attention import MultiLatentAttention, PackedMLA
from verl_mg.megatron.layers import BiasedRowParallelLinear, JointlyNormedAttention, NormedRowParallelLinear, RMSNorm
from verl_mg.megatron.linear_attention import linear_attention_spec
from verl_mg.megatron.routing import IndexRouter, RoutedLayer
from verl_mg.megatron.sparse_attention import PackedSparseMLA, SparseLatentAttention
from verl_mg.models.hf_config import HFConfig
from verl_mg.sharding.megatron import Kernels
from verl_mg.training.model_spec import ModelSpec
from verl_mg.training.packed_attention import HOPPER, use_fastest_kernels

Fields = dict[str, Any]  # arguments of `TransformerConfig` by name

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
"""Activation functions by their names in config.json."""

MANY_EXPERTS = 64  # experts from which on Transformer Engine's fused permutation is worth a warning

BIAS_UPDATE_RATE = "moe_router_bias_update_rate"
"""Field of `TransformerConfig` whose default would update the biases of routers; here they are frozen by default."""


def transformer_config(c: HFConfig, layout: Layout, spec: ModelSpec) -> TransformerConfig:
    """Creates megatron-core's configuration; the fields of `megatron.transformer` replace the job's."""
    kind = MLATransformerConfig if c.latent else TransformerConfig
    given = given_fields("transformer", kind, spec.megatron.transformer, TRANSFORMER)
    check_values(given, transformer_engine=spec.kernels == "transformer_engine")
    _check_exchange(c, spec.kernels, given.get("cp_comm_type", "a2a"))
    fields = {
        **_model_fields(c),
        **_latent_attention(c),
        **_experts(c, layout),
        **_parallelism(c, layout),
        **_kernels(c, spec.kernels),
        # Matrix products add weight gradients to DDP's float32 buffers; Apex is not needed, see `core_version`.
        "gradient_accumulation_fusion": True,
        "params_dtype": spec.dtype,
        "pipeline_dtype": spec.dtype,
        "bf16": spec.dtype is torch.bfloat16,
        # Losses are normalized over the whole mini-batch: gradients are summed, never divided again.
        "calculate_per_token_loss": True,
        # Every weight is loaded.
        "perform_initialization": False,
        "deterministic_mode": torch.are_deterministic_algorithms_enabled(),
        "bias_dropout_fusion": True,
        "bias_activation_fusion": True,
        "masked_softmax_fusion": False,
        **_recomputation(spec.recompute),
    }
    if c.activation == "gelu_pytorch_tanh" and given.get("bias_activation_fusion", True):
        # megatron-core's fused product with a gate computes the tanh approximation under this name.
        fields["activation_func"] = torch.nn.functional.gelu
    return build_config("transformer", kind, fields, given)


def check_recompute(c: HFConfig, spec: ModelSpec) -> None:
    """Checks that a model has the parts that are recomputed; the error names the key `recompute` without its role."""
    has_dense_layers = not all(c.has_experts(layer) for layer in range(c.layers))
    existing = {
        "mla_up_proj": c.latent is not None,
        "mlp": has_dense_layers,
        "moe": c.experts is not None,
        "moe_act": c.experts is not None,
        "shared_experts": c.experts is not None and bool(c.experts.shared_ffn),
    }
    for part in spec.recompute if isinstance(spec.recompute, list) else ():
        if not existing.get(part, True):
            raise UserError(f"recompute: the model has no {part}. Leave it out.")


def bias_update_rate(megatron: MegatronConfig, c: HFConfig) -> float:
    """Returns the change of a router's bias in an update, see `ExpertLoads`; 0 without such biases."""
    has_biases = c.experts is not None and c.experts.router_bias
    return float(megatron.transformer.get(BIAS_UPDATE_RATE, 0.0)) if has_biases else 0.0


def check_balancing(c: HFConfig, megatron: MegatronConfig, lora: bool) -> None:
    """Checks that a trained model has what the fields of `megatron.transformer` for balanced experts change."""
    rate, key = float(megatron.transformer.get(BIAS_UPDATE_RATE, 0.0)), f"megatron.transformer.{BIAS_UPDATE_RATE}"
    if rate < 0:
        raise UserError(f"{key}: {rate} is below 0, which would raise the loads of busy experts. Write 0 or more.")
    if rate and not bias_update_rate(megatron, c):
        raise UserError(f"{key}: the routers of the model have no bias. Leave it out.")
    if rate and lora:
        raise UserError(f"{key}: with lora all weights are frozen, biases of routers too. Leave one of them out.")


def _recomputation(recompute: Recompute) -> Fields:
    if not recompute:
        return {}
    if isinstance(recompute, list):
        # megatron-core's condition for the activation of experts.
        grouped = {"moe_grouped_gemm": True} if "moe_act" in recompute else {}
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute), **grouped}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def exchanges_keys(megatron: MegatronConfig) -> bool:
    """Returns whether context-parallel ranks exchange keys and values, and not heads as in DeepSpeed Ulysses."""
    return megatron.transformer.get("cp_comm_type", "a2a") != "a2a"


def _check_exchange(c: HFConfig, kernels: Kernels, kind: Any) -> None:
    """Checks that the kernels have the model's attention with a value of `cp_comm_type`; raises UserError otherwise."""
    key = f"megatron.transformer.cp_comm_type={kind}"
    if kind not in ("a2a", "p2p", "all_gather"):
        raise UserError(f"{key}: it is not supported. Write a2a, all_gather or p2p.")
    if kind != "a2a" and (c.linear or c.indexer):
        has = "linear attention" if c.linear else "sparse attention"
        raise UserError(f"{key}: {has}, which the model has, exchanges heads. Leave it out.")
    if kind != "p2p":
        return
    if kernels == "torch":
        raise UserError(f"{key}: it needs the kernels of Transformer Engine. Write a2a or all_gather.")
    if torch.are_deterministic_algorithms_enabled():
        raise UserError(f"{key}: with job.deterministic attention is torch's, without it. Write a2a or all_gather.")
    if c.attention_softcap or any(c.window(layer) for layer in range(c.layers)):
        raise UserError(f"{key}: it has neither windows nor a softcap, which the model has. Write a2a or all_gather.")


def token_multiple(config: TransformerConfig) -> int:
    """Returns the number that divides the tokens of a rank: products in FP8 and FP4 need such rows."""
    if config.fp8:
        return int(get_fp8_align_size(config.fp8_recipe))
    return int(get_fp4_align_size(config.fp4_recipe)) if config.fp4 else 1


def block_spec(c: HFConfig, layers: range, kernels: Kernels = "torch") -> TransformerBlockSubmodules:
    """Returns the modules of consecutive layers."""
    use_fastest_kernels()  # with Transformer Engine too: for micro-batches that it cannot compute
    if kernels == "transformer_engine":
        from verl_mg.megatron import transformer_engine_spec

        return transformer_engine_spec.block_spec(c, layers)
    specs = [_layer_spec(c, layer) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _kernels(c: HFConfig, kernels: Kernels) -> Fields:
    if kernels == "transformer_engine":
        from verl_mg.megatron import transformer_engine_spec

        return transformer_engine_spec.config_fields(c)
    return {"transformer_impl": "local"}


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
        # With it megatron-core refuses tensor parallelism of experts; a model with biases has modules of ours.
        "add_bias_linear": False,
        "add_qkv_bias": c.qkv_bias,
        "attention_output_gate": c.output_gate,
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
    dispatcher: Fields = {"moe_token_dispatcher_type": "alltoall"}
    if c.experts is None:
        return dispatcher
    # A field of 0.19.
    if "moe_hybridep_pad_uneven_dispatch_inputs" in TransformerConfig.__dataclass_fields__:
        dispatcher["moe_hybridep_pad_uneven_dispatch_inputs"] = True  # ranks have different numbers of tokens
    return dispatcher | {
        "num_moe_experts": c.experts.count,
        "moe_ffn_hidden_size": c.experts.ffn,
        "moe_shared_expert_intermediate_size": c.experts.shared_ffn or None,
        "moe_shared_expert_gate": c.experts.shared_gate,
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
        "batch_p2p_sync": False,  # for a bug of torch before 1.10
        "deallocate_pipeline_outputs": layout.pp > 1,
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
        if c.indexer:
            parts.self_attention.module = SparseLatentAttention
            parts.self_attention.params = parts.self_attention.params | {"indexer": c.indexer}
            attention.core_attention.module = PackedSparseMLA
            attention.core_attention.params["source"] = c.indexer.sources[number]
    elif c.linear and c.has_linear_attention(number):
        parts.self_attention = linear_attention_spec(c.linear)
    else:
        options = {"window": c.window(number), "softcap": c.attention_softcap, "sinks": c.attention_sinks}
        attention.core_attention = ModuleSpec(PackedAttention, options)
        if c.joint_qk_norm:
            parts.self_attention.module = JointlyNormedAttention
    if experts:
        layer.module = RoutedLayer
        parts.mlp = partial(
            ExpertsLayer,
            submodules=MoESubmodules(
                router=partial(IndexRouter, experts=experts),
                experts=partial(GroupedExperts, experts=experts),
                shared_experts=submodules(parts.mlp).shared_experts,
            ),
        )
    if c.qk_norm and not c.joint_qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if c.output_bias:
        attention.linear_proj = BiasedRowParallelLinear
    if c.sandwich_norms:
        attention.linear_proj = submodules(parts.mlp).linear_fc2 = NormedRowParallelLinear
    return layer


def _norms_inside_attention(c: HFConfig) -> bool:
    """Returns whether megatron-core builds norms in attention: of heads, or of the latents of latent attention."""
    # It sums the gradients of such norms over the tensor-parallel ranks; the weights of joint norms are shards.
    return (c.qk_norm and not c.joint_qk_norm) or c.latent is not None


def resolve_kernels(setting: Literal["auto", Kernels], dtype: torch.dtype, model: HFConfig | None = None) -> Kernels:
    """Returns the kernels of a model."""
    # With `auto` they are Transformer Engine's where it can be used.
    problem = _problem(model, dtype)
    if setting == "transformer_engine" and problem:
        raise UserError(f"model.kernels: {problem}")
    return "torch" if setting == "torch" or problem else "transformer_engine"


def chosen_kernels(model: HFConfig, spec: ModelSpec) -> Choice:
    """Returns whose kernels a model has, with a warning where others would be faster on this device."""
    if spec.kernels == "transformer_engine":
        return Choice("kernels", "Transformer Engine")
    # GPU: Transformer Engine's kernels in half precision, where it is installed.
    # GPU-TEST: tests/run/test_start_table.py::test_torch_kernels_on_a_gpu_are_a_warning_where_others_are_faster
    # GPU-RAN: h200-1, h100-1
    has_others = torch.cuda.is_available() and spec.dtype is not torch.float32
    if not has_others or model.attention_sinks or model.indexer:
        return Choice("kernels", "torch")
    slow, experts = _problem(model, spec.dtype) or "", model.experts.count if model.experts else 0
    if not slow and experts >= MANY_EXPERTS and torch.cuda.get_device_capability() >= HOPPER:
        slow = f"torch permutes the tokens of {experts} experts in several kernels. Write model.kernels=auto."
    return Choice("kernels", "torch", slow)


def _problem(model: HFConfig | None, dtype: torch.dtype) -> str | None:
    """Returns why Transformer Engine cannot be used, with the remedy; None where it can."""
    if dtype is torch.float32:
        return (
            "Transformer Engine multiplies float32 matrices in TensorFloat-32, which has 10 bits of precision. Set "
            "model.kernels=auto or torch, or model.dtype=bfloat16."
        )
    if model and (model.attention_sinks or model.indexer):
        missing = "attention sinks and no biases of experts" if model.attention_sinks else "sparse attention"
        return (
            f"the modules of Transformer Engine have no {missing} here, which {model.architecture} needs. Set "
            "model.kernels=auto or torch."
        )
    # GPU: Transformer Engine's modules and kernels where it is installed and the job is in 16 bits.
    # GPU-TEST: tests/megatron/test_transformer_engine.py::test_train_with_transformer_engine_equals_transformers,
    # tests/megatron/test_transformer_config.py::
    # test_kernels_are_requested_or_with_auto_transformer_engines_for_bfloat16_on_gpus
    # GPU-RAN: h200-1, h100-1
    if not torch.cuda.is_available():
        return "Transformer Engine needs a GPU, and torch finds none here. Set model.kernels=auto or torch."
    if not HAVE_TE:
        return (
            "Transformer Engine cannot be imported. Install launch/requirements-gpu.txt, see docs/install_on_gpus.md, "
            "or set model.kernels=torch."
        )
    return None
