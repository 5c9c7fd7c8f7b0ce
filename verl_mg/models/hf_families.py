"""Families of models: what config.json has no field for, the defaults of its fields, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_mg.errors import UserError

Fields = dict[str, Any]  # fields of config.json, or arguments of `HFConfig`, by name


@dataclass(frozen=True)
class Family:
    """Properties of a `model_type` that config.json has no field for."""

    qkv_bias: bool | str = False  # whether q, k and v have biases, or the field of config.json that says so
    qk_norm: bool | str = False  # whether queries and keys are normalized, or the field of config.json that says so
    joint_qk_norm: bool = False  # whether all heads of a token are normalized together, and not each by itself
    partial_rotary: bool = False  # whether only a part of a head may have rotary embedding
    gemma: bool = False  # Gemma 2 (arXiv:2408.00118)
    tied: bool = False
    activations: tuple[str, ...] = ("silu",)
    latent: bool = False
    experts: bool = False
    sigmoid_router: bool = False
    """Whether the router scores by sigmoid in float32, with a bias for the choice of experts, as DeepSeek-V3's does."""
    gpt_oss: bool = False  # gpt-oss (arXiv:2508.10925)
    indexer: bool = False  # whether attention is sparse: an indexer selects the keys of each query
    linear: bool = False
    """Whether there are layers with linear attention, and gates of softmax attention and of shared experts."""


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=True),
    "mixtral": Family(experts=True),
    "deepseek_v2": Family(latent=True, experts=True),
    "deepseek_v3": Family(latent=True, experts=True, sigmoid_router=True),
    "glm4_moe": Family(
        qkv_bias="attention_bias", qk_norm="use_qk_norm", partial_rotary=True, experts=True, sigmoid_router=True
    ),
    "glm4_moe_lite": Family(latent=True, experts=True, sigmoid_router=True),
    "deepseek_v32": Family(latent=True, indexer=True, experts=True, sigmoid_router=True),
    "glm_moe_dsa": Family(latent=True, indexer=True, experts=True, sigmoid_router=True),
    "minimax_m2": Family(qk_norm=True, joint_qk_norm=True, partial_rotary=True, experts=True, sigmoid_router=True),
    "gemma2": Family(gemma=True, tied=True, activations=("gelu_pytorch_tanh",)),
    "gpt_oss": Family(qkv_bias=True, experts=True, gpt_oss=True),
    "qwen3_next": Family(qk_norm=True, partial_rotary=True, experts=True, linear=True),
    "qwen3_5_text": Family(qk_norm=True, partial_rotary=True, linear=True),
    "qwen3_5_moe_text": Family(qk_norm=True, partial_rotary=True, experts=True, linear=True),
}

# Models that are another family in other sizes: Kimi-K2 has DeepSeek-V3's architecture.
SAME_AS: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}

# {model_type of a vision-language model: family of its language model, whose fields are in `text_config`}.
VISION_LANGUAGE: Mapping[str, str] = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
LANGUAGE_MODEL = "model.language_model."  # prefix of the tensors of a language model in a vision-language model
# Prefixes of tensors that an export copies from the model directory, as far as the backend does not have them, by the
# architecture of the weight table: the FSDP backend's has the vision tower.
UNTRAINED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), ("mtp.",)),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), ("mtp.", "model.visual.")),
}

_LINEAR: Fields = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_DEEPSEEK_V3: Fields = {
    "q_lora_rank": 1536,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
# Defaults of `transformers` for missing fields, where they differ from the defaults of other families.
DEFAULTS: Mapping[str, Fields] = {
    "deepseek_v2": {"q_lora_rank": 1536, "n_shared_experts": 2, "topk_method": "greedy"},
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3 | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
    "glm_moe_dsa": _DEEPSEEK_V3
    | {
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    "glm4_moe": {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    "glm4_moe_lite": {
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
    },
    "minimax_m2": {"head_dim": 128, "num_key_value_heads": 8, "norm_topk_prob": True},
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gpt_oss": {
        "head_dim": 64,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "qwen3_next": _LINEAR | {"norm_topk_prob": True, "shared_expert_intermediate_size": 512},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR | {"intermediate_size": 512, "shared_expert_intermediate_size": 512},
}

_NO_AUX: dict[str, tuple[object, ...]] = {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)}
_GATES: Mapping[str, tuple[object, ...]] = {"attn_output_gate": (True,), "output_gate_type": ("silu", "swish")}
# Supported values of fields that select a variant of the architecture.
SUPPORTED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "deepseek_v2": {
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),
    },
    "deepseek_v3": _NO_AUX,
    "glm4_moe": _NO_AUX | {"tie_word_embeddings": (False,)},
    "glm4_moe_lite": _NO_AUX | {"partial_rotary_factor": (1,), "tie_word_embeddings": (False,)},
    "deepseek_v32": _NO_AUX | {"rope_interleave": (True,)},
    "glm_moe_dsa": _NO_AUX | {"rope_interleave": (True,), "tie_word_embeddings": (False,)},
    "minimax_m2": {
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "scoring_func": ("sigmoid",),
        "use_routing_bias": (True,),
        "norm_topk_prob": (True,),
        "shared_intermediate_size": (0,),
        "tie_word_embeddings": (False,),
    },
    "gemma2": {"use_bidirectional_attention": (False,)},
    "gpt_oss": {"attention_bias": (True,)},
    "qwen3_next": _GATES,
    "qwen3_5_text": _GATES,
    "qwen3_5_moe_text": _GATES,
}


def check_supported(raw: Fields, family: Family, where: str) -> None:
    """Raises UserError for a variant that is not implemented: it would change the numbers without a word."""
    supported_values = SUPPORTED.get(raw["model_type"], {})
    for field in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if raw.get(field) and field != family.qkv_bias and field not in supported_values:
            raise UserError(
                f"{where}: {field}={raw[field]} is not supported for model_type {raw['model_type']!r}. "
                "Use another model."
            )
    # Only Mixtral has no switch for the window in addition to its width.
    if raw["model_type"] == "mixtral" and raw.get("sliding_window"):
        window = raw["sliding_window"]
        raise UserError(f"{where}: sliding_window={window} is not supported. If no row is longer, write null.")
    given = rope_fields(raw) | raw
    for field, supported in supported_values.items():
        if given.get(field) is not None and given[field] not in supported:
            raise UserError(
                f"{where}: {field}={given[field]!r} is not supported for model_type {raw['model_type']!r}. Write "
                f"{' or '.join(map(repr, supported))}, or leave it out."
            )
    if (kind := rope_type(rope_fields(raw))) in ("dynamic", "longrope"):
        raise UserError(
            f"{where}: rope_type={kind!r} is not supported, its frequencies change with the length of a row. Write one "
            "of 'default', 'linear', 'llama3', 'yarn'."
        )
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or family.activations[0]
    if activation not in family.activations:
        raise UserError(
            f"{where}: hidden_act={activation!r} is not supported. Use a model with {family.activations[0]!r}."
        )


def rope_fields(raw: Fields) -> Fields:
    """Returns the fields of the rotary embedding, which have had two names in config.json."""
    return raw.get("rope_scaling") or raw.get("rope_parameters") or {}


def rope_type(rope: Fields) -> str:
    """Returns the kind of rotary embedding by its fields."""
    return str(rope.get("rope_type") or rope.get("type") or "default")
