"""The sizes and switches of a model, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_mg.errors import UserError

Fields = dict[str, Any]


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). Ranks and widths in elements."""

    q_rank: int  # 0: queries are projected at once
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture-of-experts layers of a model."""

    count: int
    ffn: int
    top_k: int
    shared_ffn: int  # width of all shared experts together; 0: none
    router_bias: bool
    normalized: bool  # the weights of a token's experts add up to 1
    layers: frozenset[int]  # which layers have experts; the others are dense


@dataclass(frozen=True)
class HFConfig:
    """What the weight table and the Megatron model need to know. Sizes are in elements."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    max_positions: int
    eos_token_ids: tuple[int, ...]
    four_norms: bool = False
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether layer number `layer` (from 0) is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers


@dataclass(frozen=True)
class _Family:
    """What the field names of a `model_type` leave unsaid."""

    qkv_bias: bool = False
    qk_norm: bool = False
    four_norms: bool = False
    tied: bool = False
    activations: tuple[str, ...] = ("silu",)
    latent: bool = False
    experts: bool = False


FAMILIES = {
    "llama": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
    "qwen3_moe": _Family(qk_norm=True, experts=True),
    "mixtral": _Family(experts=True),
    "deepseek_v2": _Family(latent=True, experts=True),
    "deepseek_v3": _Family(latent=True, experts=True),
    "gemma2": _Family(four_norms=True, tied=True, activations=("gelu_pytorch_tanh",)),
}


def read_config(model: str | Path) -> HFConfig:
    """The configuration of a Hugging Face model directory, or of one `config.json` by its own path.

    UserError where it is missing or not supported.
    """
    path = Path(model)
    if not path.is_file():
        if not path.is_dir():
            raise UserError(f"{path}: no such model directory; model.path or --model must be a Hugging Face one")
        path = path / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: missing; model.path or --model must be a Hugging Face directory") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable JSON file ({error})") from None
    return parse_config(raw, str(path))


def parse_config(raw: Any, where: str = "config.json") -> HFConfig:
    """The same from the decoded JSON; `where` names it in errors."""
    if not isinstance(raw, dict):
        raise UserError(f"{where}: a {type(raw).__name__}, not an object with the fields of a model")
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise UserError(f"{where}: model_type {kind!r} is not supported; supported are {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    _refuse_what_is_not_built(raw, family, where)
    try:
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        layers = int(raw["num_hidden_layers"])
        latent = _latent(raw) if family.latent else None
        return HFConfig(
            architecture=kind,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads if latent else int(raw.get("num_key_value_heads") or heads),
            head_dim=latent.nope_dim + latent.rope_dim if latent else int(raw.get("head_dim") or hidden // heads),
            ffn=int(raw["intermediate_size"]),
            vocab=int(raw["vocab_size"]),
            tied=bool(raw.get("tie_word_embeddings", family.tied)),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            eos_token_ids=_token_ids(raw.get("eos_token_id")),
            four_norms=family.four_norms,
            latent=latent,
            experts=_experts(raw, layers) if family.experts else None,
        )
    except KeyError as error:
        raise UserError(f"{where}: the field {error.args[0]!r} is missing") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{where}: a size is not a number ({error})") from None


def _latent(raw: Fields) -> LatentConfig:
    return LatentConfig(
        q_rank=int(raw.get("q_lora_rank") or 0),
        kv_rank=int(raw["kv_lora_rank"]),
        nope_dim=int(raw["qk_nope_head_dim"]),
        rope_dim=int(raw["qk_rope_head_dim"]),
        v_dim=int(raw["v_head_dim"]),
    )


def _experts(raw: Fields, layers: int) -> ExpertsConfig | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = raw[next((name for name in names if name in raw), names[0])]
    width = int(raw.get("moe_intermediate_size") or raw["intermediate_size"])  # Mixtral has no dense layers
    with_experts = frozenset(
        layer
        for layer in range(layers)
        if layer >= int(raw.get("first_k_dense_replace", 0))
        and layer % int(raw.get("moe_layer_freq", 1)) == 0
        and (layer + 1) % int(raw.get("decoder_sparse_step", 1)) == 0
        and layer not in (raw.get("mlp_only_layers") or ())
    )
    if not int(count) or not with_experts:
        return None
    return ExpertsConfig(
        count=int(count),
        ffn=width,
        top_k=int(raw["num_experts_per_tok"]),
        shared_ffn=width * int(raw.get("n_shared_experts") or 0),
        router_bias=raw["model_type"] == "deepseek_v3",
        normalized=raw["model_type"] == "mixtral" or bool(raw.get("norm_topk_prob")),
        layers=with_experts,
    )


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _refuse_what_is_not_built(raw: Fields, family: _Family, where: str) -> None:
    """A switch that would silently change the numbers is an error, not a guess."""
    for field in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if raw.get(field):
            raise UserError(f"{where}: {field}={raw[field]} is not supported for model_type {raw['model_type']!r}")
    # Of all families Mixtral alone has no switch beside the width of the window.
    if raw["model_type"] == "mixtral" and raw.get("sliding_window"):
        window = raw["sliding_window"]
        raise UserError(f"{where}: sliding_window={window} is not supported; where no row is longer, write null")
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or family.activations[0]
    if activation not in family.activations:
        raise UserError(f"{where}: hidden_act={activation!r} is not supported; only {family.activations[0]!r} is")
