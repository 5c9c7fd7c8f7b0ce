"""The sizes and switches of a model, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_mg.errors import UserError


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


@dataclass(frozen=True)
class _Family:
    """What the field names of a `model_type` leave unsaid."""

    qkv_bias: bool
    qk_norm: bool


FAMILIES = {
    "llama": _Family(qkv_bias=False, qk_norm=False),
    "qwen2": _Family(qkv_bias=True, qk_norm=False),
    "qwen3": _Family(qkv_bias=False, qk_norm=True),
}


def read_config(model_dir: str | Path) -> HFConfig:
    """The configuration of a Hugging Face model directory. UserError where it is missing or not supported."""
    folder = Path(model_dir)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such model directory; model.path must be a Hugging Face directory")
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: missing; model.path must be a Hugging Face directory with a config.json") from None
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
    _refuse_what_is_not_built(raw, where)
    family = FAMILIES[kind]
    try:
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        return HFConfig(
            architecture=kind,
            layers=int(raw["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            ffn=int(raw["intermediate_size"]),
            vocab=int(raw["vocab_size"]),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            eos_token_ids=_token_ids(raw.get("eos_token_id")),
        )
    except KeyError as error:
        raise UserError(f"{where}: the field {error.args[0]!r} is missing") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{where}: a size is not a number ({error})") from None


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _refuse_what_is_not_built(raw: dict[str, Any], where: str) -> None:
    """A switch that would silently change the numbers is an error, not a guess."""
    refused = {
        "attention_bias": raw.get("attention_bias"),
        "mlp_bias": raw.get("mlp_bias"),
        "use_sliding_window": raw.get("use_sliding_window"),
    }
    for field, value in refused.items():
        if value:
            raise UserError(f"{where}: {field}={value} is not supported for model_type {raw['model_type']!r}")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act={raw['hidden_act']!r} is not supported; only 'silu' is")
