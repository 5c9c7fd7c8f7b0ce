"""Sizes of a model that only `transformers` knows, from the fields that its configurations have in common."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_mg.errors import UserError
from verl_mg.models.hf_config import ExpertsConfig, HFConfig, read_config
from verl_mg.models.transformers_module import read_module_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Names of fields that configurations use for the same size, the more common ones first.
COUNT_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_OF_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
WIDTH_OF_EXPERT = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")


def read_any_config(model_dir: str | Path) -> HFConfig:
    """Reads the sizes of a model directory: of a family with a weight table, or of any model of `transformers`."""
    try:
        return read_config(model_dir)
    except UserError:  # of another family, or a variant that only `transformers` has
        config = read_module_config(model_dir)
    layers = frozenset(range(getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)))
    return module_config(config, model_dir, bool(getattr(config, "tie_word_embeddings", False)), layers)


def module_config(config: PretrainedConfig, where: str | Path, tied: bool, mixtures: frozenset[int]) -> HFConfig:
    """Returns the sizes of a language model, of its text part where it has others."""
    text = config.get_text_config(decoder=True)

    def size(name: str) -> int:
        value = getattr(text, name, None)
        if not isinstance(value, int):
            raise UserError(
                f"{Path(where) / 'config.json'}: {name} is {value!r} in the configuration of "
                f"{config.model_type!r}, not a number. Use a language model."
            )
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    kv_heads = getattr(text, "num_key_value_heads", None)
    ends = getattr(config, "eos_token_id", None) or getattr(text, "eos_token_id", None)
    return HFConfig(
        architecture=config.model_type,
        layers=size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads if isinstance(kv_heads, int) else heads,
        head_dim=head_dim,
        rotary_dim=int(head_dim * (getattr(text, "partial_rotary_factor", None) or 1.0)),
        ffn=_first(text, ("intermediate_size", "ffn_dim", "n_inner")) or 4 * hidden,
        vocab=size("vocab_size"),
        tied=tied,
        qkv_bias=False,
        qk_norm=False,
        norm_eps=getattr(text, "rms_norm_eps", None) or getattr(text, "layer_norm_eps", None) or 1e-6,
        max_positions=_first(text, ("max_position_embeddings", "n_positions")) or 2048,
        eos_token_ids=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
        attention_scale=1 / math.sqrt(head_dim),
        experts=_experts(text, mixtures),
    )


def _experts(text: Any, mixtures: frozenset[int]) -> ExpertsConfig | None:
    count, top_k, width = (_first(text, names) for names in (COUNT_OF_EXPERTS, EXPERTS_OF_TOKEN, WIDTH_OF_EXPERT))
    if not (count and top_k and width and mixtures):
        return None
    shared = getattr(text, "shared_expert_intermediate_size", None)
    shared = shared or width * (_first(text, ("n_shared_experts", "moe_num_shared_experts")) or 0)
    return ExpertsConfig(
        count=count,
        ffn=width,
        top_k=top_k,
        shared_ffn=shared,
        router_bias=False,
        normalized=False,
        layers=mixtures,
    )


def _first(text: Any, names: tuple[str, ...]) -> int | None:
    # By type: a field may be None, or a list with a value for each layer.
    return next((value for name in names if isinstance(value := getattr(text, name, None), int)), None)
