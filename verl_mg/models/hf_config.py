"""The sizes and switches of a model, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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
    qk_nope_head_dim: int
    rope_dim: int
    v_dim: int
    interleaved: bool = True  # the two elements that are rotated together are neighbours; else half the width apart


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
    sigmoid: bool = False  # an expert's score is the sigmoid of its logit; else the softmax over all
    float32: bool = False  # logits are computed in float32
    groups: int = 1  # a token's experts come from the `top_groups` of these groups that are rated highest
    topk_groups: int = 1
    group_score_topk: int = 1  # a group's rating is the sum of so many of its highest scores
    scale: float = 1.0  # of the weights of a token's experts


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
    attention_scale: float  # products of queries and keys are multiplied by it
    activation: str = "silu"
    sandwich_norms: bool = False
    zero_centered_norms: bool = False  # a norm multiplies by 1 + its weight
    scaled_embedding: bool = False  # by the root of the hidden size
    sliding_windows: tuple[
        int | None, ...
    ] = ()  # by layer: of how many last tokens a token sees itself and those before it
    attention_softcap: float | None = None  # s becomes softcap * tanh(s / softcap), for products of queries and keys
    logit_softcap: float | None = None
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether layer number `layer` (from 0) is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers

    def window(self, layer: int) -> int | None:
        """How many tokens a token of the layer attends to at most, itself included; None: to all before it."""
        return self.sliding_windows[layer] if self.sliding_windows else None


@dataclass(frozen=True)
class _Family:
    """What the field names of a `model_type` leave unsaid."""

    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False
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
    "gemma2": _Family(gemma=True, tied=True, activations=("gelu_pytorch_tanh",)),
}

# What `transformers` takes for a field that is missing, where it is not what we take for other families.
_DEFAULTS: Mapping[str, Fields] = {
    "deepseek_v2": {"q_lora_rank": 1536, "n_shared_experts": 2, "topk_method": "greedy"},
    "deepseek_v3": {
        "q_lora_rank": 1536,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}

# Of a field with other values the checkpoint's module in `transformers` knows nothing, or we know nothing.
_BUILT: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "deepseek_v2": {
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),
    },
    "deepseek_v3": {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
    "gemma2": {"use_bidirectional_attention": (False,)},
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
    raw = _DEFAULTS.get(kind, {}) | raw
    _refuse_what_is_not_built(raw, family, where)
    try:
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        layers = int(raw["num_hidden_layers"])
        latent = _latent(raw) if family.latent else None
        head_dim = latent.qk_nope_head_dim + latent.rope_dim if latent else int(raw.get("head_dim") or hidden // heads)
        return HFConfig(
            architecture=kind,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads if latent else int(raw.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            ffn=int(raw["intermediate_size"]),
            vocab=int(raw["vocab_size"]),
            tied=bool(raw.get("tie_word_embeddings", family.tied)),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            eos_token_ids=_token_ids(raw.get("eos_token_id")),
            attention_scale=_attention_scale(raw, head_dim, family),
            latent=latent,
            experts=_experts(raw, layers, where) if family.experts else None,
            **(_gemma(raw, layers, where) if family.gemma else {}),
        )
    except KeyError as error:
        raise UserError(f"{where}: the field {error.args[0]!r} is missing") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{where}: a size is not a number ({error})") from None


def _latent(raw: Fields) -> LatentConfig:
    return LatentConfig(
        q_rank=int(raw.get("q_lora_rank") or 0),
        kv_rank=int(raw["kv_lora_rank"]),
        qk_nope_head_dim=int(raw["qk_nope_head_dim"]),
        rope_dim=int(raw["qk_rope_head_dim"]),
        v_dim=int(raw["v_head_dim"]),
        interleaved=raw["model_type"] == "deepseek_v2" or bool(raw.get("rope_interleave", True)),
    )


def _attention_scale(raw: Fields, head_dim: int, family: _Family) -> float:
    """The inverse root of the width of a head, or what a family has in its place.

    Latent attention raises it where positions are stretched (YaRN, arXiv:2309.00071, section 3.4).
    """
    if family.gemma:
        return float(raw["query_pre_attn_scalar"]) ** -0.5
    rope = _rope(raw)
    stretched = family.latent and rope.get("mscale_all_dim") and _rope_type(rope) != "default"
    factor = float(rope["factor"]) if stretched else 1.0
    temperature = 0.1 * rope["mscale_all_dim"] * math.log(factor) + 1.0 if factor > 1 else 1.0
    return float(temperature**2 / math.sqrt(head_dim))


def _rope(raw: Fields) -> Fields:
    return raw.get("rope_scaling") or raw.get("rope_parameters") or {}


def _rope_type(rope: Fields) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _gemma(raw: Fields, layers: int, where: str) -> Fields:
    """What Gemma 2 has beside grouped-query attention and a gated feed-forward layer (arXiv:2408.00118)."""
    kinds = raw.get("layer_types") or [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
    if len(kinds) != layers or not {"sliding_attention", "full_attention"}.issuperset(kinds):
        raise UserError(
            f"{where}: layer_types={kinds} is not supported; write 'sliding_attention' or 'full_attention' for each of "
            f"the {layers} layers"
        )
    window = int(raw["sliding_window"]) if raw["sliding_window"] else None
    return {
        "activation": "gelu_pytorch_tanh",
        "sandwich_norms": True,
        "zero_centered_norms": True,
        "scaled_embedding": True,
        "sliding_windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
        "attention_softcap": _number(raw["attn_logit_softcapping"]),
        "logit_softcap": _number(raw["final_logit_softcapping"]),
    }


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _experts(raw: Fields, layers: int, where: str) -> ExpertsConfig | None:
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
    with_bias = raw["model_type"] == "deepseek_v3"
    grouped = with_bias or raw.get("topk_method") == "group_limited_greedy"
    experts = ExpertsConfig(
        count=int(count),
        ffn=width,
        top_k=int(raw["num_experts_per_tok"]),
        shared_ffn=width * int(raw.get("n_shared_experts") or 0),
        router_bias=with_bias,
        normalized=raw["model_type"] == "mixtral" or bool(raw.get("norm_topk_prob")),
        layers=with_experts,
        sigmoid=with_bias,
        float32=with_bias or raw["model_type"] == "deepseek_v2",
        groups=int(raw.get("n_group") or 1) if grouped else 1,
        topk_groups=int(raw.get("topk_group") or 1) if grouped else 1,
        group_score_topk=2 if with_bias else 1,
        scale=float(raw.get("routed_scaling_factor") or 1.0),
    )
    if grouped:
        _check_groups(experts, where)
    return experts


def _check_groups(experts: ExpertsConfig, where: str) -> None:
    size = experts.count // experts.groups
    if experts.count % experts.groups or size < experts.group_score_topk or experts.topk_groups * size < experts.top_k:
        raise UserError(
            f"{where}: n_group={experts.groups} and topk_group={experts.topk_groups} cannot be: {experts.count} "
            "experts "
            f"must come in groups of at least {experts.group_score_topk}, and topk_group of them have "
            f"{experts.top_k} to take"
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
    for field, built in _BUILT.get(raw["model_type"], {}).items():
        if raw.get(field) is not None and raw[field] not in built:
            raise UserError(
                f"{where}: {field}={raw[field]!r} is not supported for model_type {raw['model_type']!r}; write "
                f"{' or '.join(map(repr, built))}, or leave it out"
            )
    if (kind := _rope_type(_rope(raw))) in ("dynamic", "longrope"):
        raise UserError(
            f"{where}: rope_type={kind!r} is not supported, its frequencies change with the length of a row; write one "
            "of 'default', 'linear', 'llama3', 'yarn'"
        )
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or family.activations[0]
    if activation not in family.activations:
        raise UserError(f"{where}: hidden_act={activation!r} is not supported; only {family.activations[0]!r} is")
