"""Sizes and switches of a model, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_mg.errors import UserError
from verl_mg.models.attention_config import IndexerConfig, LinearConfig, layer_types, parse_indexer, parse_linear
from verl_mg.models.hf_families import (
    DEFAULTS,
    FAMILIES,
    LANGUAGE_MODEL,
    SAME_AS,
    VISION_LANGUAGE,
    Family,
    Fields,
    check_supported,
    rope_fields,
    rope_type,
)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1). Ranks and widths in elements."""

    q_rank: int  # rank of the compressed queries; 0: queries are projected directly
    kv_rank: int  # rank of the compressed keys and values
    qk_nope_head_dim: int  # width of the part of a head without rotary embedding
    rope_dim: int  # width of the part of a head with rotary embedding
    v_dim: int  # width of a value head
    interleaved: bool = True
    """Whether the two elements that are rotated together are neighbours; otherwise they are half the width apart."""


@dataclass(frozen=True)
class ClampedSwiGLU:
    """Activation of gpt-oss's experts (arXiv:2508.10925, section 2.1): the inputs are clamped, and 1 is added to up.

    With g = min(gate, limit) and u = clamp(up, -limit, limit) it is (u + 1) * g * sigmoid(alpha * g).
    """

    alpha: float  # factor inside the sigmoid
    limit: float  # bound of gate and up


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixture-of-experts layers of a model."""

    count: int  # routed experts of a layer
    ffn: int  # width of a routed expert
    top_k: int  # experts of a token
    shared_ffn: int  # width of all shared experts together; 0: none
    router_bias: bool  # whether a bias is added to the scores only for the choice of experts
    normalized: bool  # whether the weights of a token's experts add up to 1
    layers: frozenset[int]  # indices of the layers with experts; the others are dense
    sigmoid: bool = False
    """Whether an expert's score is the sigmoid of its logit; otherwise it is the softmax over all experts."""
    float32: bool = False  # whether the router's logits are computed in float32
    groups: int = 1  # groups of experts; a token's experts come from the groups with the highest scores
    topk_groups: int = 1  # groups from which a token's experts come
    group_score_topk: int = 1  # a group's score is the sum of this many of its highest expert scores
    scale: float = 1.0  # factor on the weights of a token's experts
    biases: bool = False  # whether the router and the projections of routed experts have biases
    alternating: bool = False
    """Whether gate and up are one projection with alternating rows, in tensors that stack all experts."""
    stacked: bool = False
    """Whether the files stack gate and up projections of all experts, and down projections, in their order of axes."""
    clamped: ClampedSwiGLU | None = None  # activation of routed experts in place of the model's; None for the model's
    shared_gate: bool = False
    """Whether the output of the shared experts is multiplied by the sigmoid of a projection of the token."""


@dataclass(frozen=True)
class MultiTokenConfig:
    """Layer of multi-token prediction after the others (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""

    has_copies: bool = False  # whether the checkpoint repeats embedding and output layer among its tensors
    stacked: bool = False  # whether the files stack its experts, see `ExpertsConfig.stacked`


@dataclass(frozen=True)
class HFConfig:
    """Configuration of a model, as the weight table and the Megatron model need it. Sizes are in elements."""

    architecture: str  # the `model_type` of config.json
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    """Number of elements of a head with rotary embedding: its first ones, or with latent attention its last ones."""
    ffn: int  # width of a dense feed-forward layer
    vocab: int  # tokens of the vocabulary, unpadded
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    max_positions: int  # maximum length of a row in tokens
    attention_scale: float  # factor on the products of queries and keys
    prefix: str = "model."  # prefix of the tensors of embedding, layers and final norm
    output_bias: bool = False  # whether the output projection of attention has a bias
    attention_sinks: bool = False
    """Whether each query head has a learned score to which no token belongs (arXiv:2309.17453)."""
    joint_qk_norm: bool = False
    """Whether queries and keys of all heads of a token are normalized together, and not each head by itself."""
    activation: str = "silu"
    sandwich_norms: bool = False
    """Whether the outputs of attention and feed-forward layers are normalized too (Gemma 2)."""
    zero_centered_norms: bool = False  # whether a norm multiplies by 1 + its weight
    scaled_embedding: bool = False  # whether embeddings are multiplied by the square root of the hidden size
    sliding_windows: tuple[int | None, ...] = ()
    """For each layer, the number of tokens that a token attends to at most, including itself; None: all before it."""
    attention_softcap: float | None = None  # products s of queries and keys become softcap * tanh(s / softcap)
    logit_softcap: float | None = None  # the same for the logits of the output layer
    output_gate: bool = False
    """Whether the output of softmax attention is multiplied by the sigmoid of a further projection (Qwen3-Next)."""
    linear: LinearConfig | None = None  # layers with linear attention; None for a model without
    indexer: IndexerConfig | None = None
    """Sparse attention, which is latent attention to selected keys; None where queries attend to all keys."""
    latent: LatentConfig | None = None  # latent attention; None for grouped-query attention
    experts: ExpertsConfig | None = None  # mixture of experts; None for a dense model
    multi_token: MultiTokenConfig | None = None
    """Layer of multi-token prediction; None without, and where it is left out, see `hf_tensors`."""

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer (from 0) is a mixture of experts; multi-token prediction is where others are."""
        if layer == self.layers:
            return self.multi_token is not None and self.experts is not None
        return self.experts is not None and layer in self.experts.layers

    def has_linear_attention(self, layer: int) -> bool:
        """Returns whether layer number `layer` (from 0) has linear attention."""
        return self.linear is not None and layer in self.linear.layers

    def has_indexer(self, layer: int) -> bool:
        """Returns whether layer number `layer` (from 0) selects keys; others share a selection, or attend to all."""
        return self.indexer is not None and self.indexer.has_indexer(layer)

    @property
    def with_vision(self) -> bool:
        """Whether it is the language model of a vision-language model."""
        return self.prefix == LANGUAGE_MODEL

    @property
    def linear_value_heads(self) -> int:
        """Value heads of linear attention; 0 without."""
        return self.linear.value_heads if self.linear else 0

    def window(self, layer: int) -> int | None:
        """Returns the sliding window of a layer in tokens; None: a token attends to all before it."""
        return self.sliding_windows[layer] if self.sliding_windows else None


def read_json(path: Path) -> Any:
    """Returns the contents of a JSON file, read again only where it has changed. OSError or ValueError."""
    state = path.stat()
    # A copy, which the caller may change.
    return deepcopy(_contents(path, state.st_mtime_ns, state.st_size, state.st_ino))


@lru_cache(maxsize=32)  # a job reads config.json of a model in many places
def _contents(path: Path, *state: int) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_config(model: str | Path) -> HFConfig:
    """Reads the configuration of a Hugging Face model directory, or a `config.json` by its path."""
    path = Path(model)
    if not path.is_file():
        if not path.is_dir():
            raise UserError(f"{path}: no such model directory. Set model.path or --model to a Hugging Face directory.")
        path = path / "config.json"
    try:
        raw = read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path}: missing. Set model.path or --model to a Hugging Face directory.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable JSON file ({error}). Download the model again.") from None
    config = parse_config(raw, str(path))
    # Nothing in config.json says whether Qwen3.5's files stack the experts.
    if config.linear and config.experts and stacks_experts(names_of_tensors(path.parent), config.prefix):
        return replace(config, experts=replace(config.experts, stacked=True))
    return config


def other_choice(model: str | Path) -> str:
    """Returns what to do about a model that the backend fsdp refuses, as the last sentence of its message."""
    try:
        read_config(model)
    except UserError:  # Megatron has no such family
        return "Use another model."
    return "Use backend: megatron, or another model."


class UnknownFamilyError(UserError):
    """A model of a family that has no weight table."""


def parse_config(raw: Any, where: str = "config.json") -> HFConfig:
    """Parses the decoded JSON of a config.json; UserError for a field that is missing or not supported."""
    if not isinstance(raw, dict):
        raise UserError(
            f"{where}: a {type(raw).__name__}, not an object with the fields of a model. Use a config.json."
        )
    kind, prefix = str(raw.get("model_type")), "model."
    # Code in a model's directory is never run: what transformers does not know by name is read as the family it is.
    kind = SAME_AS.get(kind, kind)
    if kind in VISION_LANGUAGE:
        kind, prefix, raw = VISION_LANGUAGE[kind], LANGUAGE_MODEL, _text_fields(raw, where)
    if kind not in FAMILIES:
        known = ", ".join((*FAMILIES, *VISION_LANGUAGE))
        raise UnknownFamilyError(f"{where}: model_type {kind!r} is not supported. Choose from {known}.")
    family = FAMILIES[kind]
    raw = DEFAULTS.get(kind, {}) | raw | {"model_type": kind}
    check_supported(raw, family, where)
    try:
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        layers = int(raw["num_hidden_layers"])
        latent = _latent(raw) if family.latent else None
        head_dim = latent.qk_nope_head_dim + latent.rope_dim if latent else int(raw.get("head_dim") or hidden // heads)
        return HFConfig(
            architecture=kind,
            prefix=prefix,
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads if latent else int(raw.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            rotary_dim=latent.rope_dim if latent else _rotary_dim(raw, head_dim, family, where),
            ffn=int(raw["intermediate_size"]),
            vocab=int(raw["vocab_size"]),
            tied=bool(raw.get("tie_word_embeddings", family.tied)),
            qkv_bias=_switch(raw, family.qkv_bias),
            qk_norm=_switch(raw, family.qk_norm),
            joint_qk_norm=family.joint_qk_norm,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            attention_scale=_attention_scale(raw, head_dim, family),
            latent=latent,
            indexer=parse_indexer(raw, layers, where) if family.indexer else None,
            experts=_experts(raw, layers, family, where) if family.experts else None,
            activation="gelu_pytorch_tanh" if family.gemma else "silu",
            sandwich_norms=family.gemma,
            zero_centered_norms=family.gemma or family.linear,
            scaled_embedding=family.gemma,
            sliding_windows=_sliding_windows(raw, layers, where) if family.gemma or family.gpt_oss else (),
            attention_softcap=_number(raw["attn_logit_softcapping"]) if family.gemma else None,
            logit_softcap=_number(raw["final_logit_softcapping"]) if family.gemma else None,
            output_bias=family.gpt_oss,
            attention_sinks=family.gpt_oss,
            output_gate=family.linear,
            linear=parse_linear(raw, layers, where) if family.linear else None,
        )
    except KeyError as error:
        raise UserError(f"{where}: the field {error.args[0]!r} is missing. Use the model's own config.json.") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{where}: a size is not a number ({error}). Use the model's own config.json.") from None


def _text_fields(raw: Fields, where: str) -> Fields:
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"{where}: text_config is missing. Use the model's own config.json.")
    tied = raw.get("tie_word_embeddings")
    return text if tied is None else text | {"tie_word_embeddings": tied}


def _switch(raw: Fields, value: bool | str) -> bool:
    # A name is that of the field of config.json that decides.
    return bool(raw.get(value)) if isinstance(value, str) else value


def _rotary_dim(raw: Fields, head_dim: int, family: Family, where: str) -> int:
    """Returns the number of elements of a head with rotary embedding, as `transformers` computes it."""
    if not family.partial_rotary:
        return head_dim
    given = raw.get("rotary_dim")  # MiniMax-M2
    share = float((raw | rope_fields(raw)).get("partial_rotary_factor", given / head_dim if given else 1.0))
    width = int(head_dim * share)
    if width % 2 or not 0 < width <= head_dim:
        raise UserError(
            f"{where}: partial_rotary_factor={share} is not possible: of the {head_dim} elements of a head an even "
            "number must have rotary embedding. Use the model's own config.json."
        )
    return width


def _latent(raw: Fields) -> LatentConfig:
    return LatentConfig(
        q_rank=int(raw.get("q_lora_rank") or 0),
        kv_rank=int(raw["kv_lora_rank"]),
        qk_nope_head_dim=int(raw["qk_nope_head_dim"]),
        rope_dim=int(raw["qk_rope_head_dim"]),
        v_dim=int(raw["v_head_dim"]),
        interleaved=raw["model_type"] == "deepseek_v2" or bool(raw.get("rope_interleave", True)),
    )


def _attention_scale(raw: Fields, head_dim: int, family: Family) -> float:
    """Returns the inverse square root of the width of a head, or the value that the architecture uses instead."""
    if family.gemma:
        return float(raw["query_pre_attn_scalar"]) ** -0.5
    rope = rope_fields(raw)
    # Latent attention raises the scale where positions are stretched (YaRN, arXiv:2309.00071, section 3.4).
    stretched = family.latent and rope.get("mscale_all_dim") and rope_type(rope) != "default"
    factor = float(rope["factor"]) if stretched else 1.0
    temperature = 0.1 * rope["mscale_all_dim"] * math.log(factor) + 1.0 if factor > 1 else 1.0
    return float(temperature**2 / math.sqrt(head_dim))


def _sliding_windows(raw: Fields, layers: int, where: str) -> tuple[int | None, ...]:
    """Returns the window of each layer; every other layer has one, beginning with the first, where none is named."""
    kinds = layer_types(raw, ("sliding_attention", "full_attention"), [layer % 2 for layer in range(layers)], where)
    window = int(raw["sliding_window"]) if raw["sliding_window"] else None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _experts(raw: Fields, layers: int, family: Family, where: str) -> ExpertsConfig | None:
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
    # transformers reads mlp_layer_types, the engines first_k_dense_replace: they must be the same model.
    kinds = raw.get("mlp_layer_types")  # GLM-4.7-Flash
    if kinds and kinds != ["sparse" if layer in with_experts else "dense" for layer in range(layers)]:
        raise UserError(
            f"{where}: mlp_layer_types={kinds} has other layers with experts than first_k_dense_replace="
            f"{raw.get('first_k_dense_replace')}, which engines read. Correct one of them."
        )
    if not int(count) or not with_experts:
        return None
    with_bias, gpt_oss = family.sigmoid_router, family.gpt_oss
    grouped = with_bias or raw.get("topk_method") == "group_limited_greedy"
    experts = ExpertsConfig(
        count=int(count),
        ffn=width,
        top_k=int(raw["num_experts_per_tok"]),
        shared_ffn=int(raw.get("shared_expert_intermediate_size") or width * int(raw.get("n_shared_experts") or 0)),
        router_bias=with_bias,
        # The softmax over the chosen experts' logits is their part of the softmax over all.
        normalized=raw["model_type"] in ("mixtral", "gpt_oss", "qwen3_5_moe_text") or bool(raw.get("norm_topk_prob")),
        layers=with_experts,
        sigmoid=with_bias,
        # As the engines compute; transformers computes MiniMax's in the dtype of the model.
        float32=with_bias or raw["model_type"] == "deepseek_v2",
        groups=int(raw.get("n_group") or 1) if grouped else 1,
        topk_groups=int(raw.get("topk_group") or 1) if grouped else 1,
        group_score_topk=2 if with_bias else 1,
        scale=float(raw.get("routed_scaling_factor") or 1.0),
        biases=gpt_oss,
        alternating=gpt_oss,
        clamped=ClampedSwiGLU(float(raw["swiglu_alpha"]), float(raw["swiglu_limit"])) if gpt_oss else None,
        shared_gate=family.linear,
    )
    if grouped:
        _check_groups(experts, where)
    return experts


def _check_groups(experts: ExpertsConfig, where: str) -> None:
    size = experts.count // experts.groups
    if experts.count % experts.groups or size < experts.group_score_topk or experts.topk_groups * size < experts.top_k:
        raise UserError(
            f"{where}: n_group={experts.groups} and topk_group={experts.topk_groups} are not possible: {experts.count} "
            f"experts must form groups of at least {experts.group_score_topk}, and topk_group of them must have "
            f"at least {experts.top_k} experts. Correct n_group or topk_group."
        )


def weight_map(folder: Path) -> dict[str, str] | None:
    """Returns {tensor: name of its file} of the index of a directory; None without an index.

    UserError where the directory has two models: transformers reads the single file, engines what the index names.
    """
    index = folder / INDEX
    if not index.exists():
        return None
    try:
        files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        others = sorted(set(files.values()) - {SINGLE})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index}: not a safetensors index ({error}). Download the model again.") from None
    if others and (folder / SINGLE).exists():
        gone = not any((folder / name).exists() for name in others)
        remedy = "Remove the index" if gone else f"Remove {SINGLE}, or the index and its files"
        raise UserError(f"{index}: names {others[0]}, and {SINGLE} is there too, of another model. {remedy}.")
    return files


def names_of_tensors(folder: Path) -> Collection[str]:
    """Returns the names in the index of a directory, or in its only file; () where it has neither."""
    try:
        if (files := weight_map(folder)) is not None:
            return files
        # Only the header, which follows its length of 8 bytes: the file may be many GB.
        with open(folder / SINGLE, "rb") as file:
            return frozenset(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    except (UserError, OSError, ValueError, LookupError, TypeError):  # reported where the weights are read
        return ()


def stacks_experts(names: Collection[str], prefix: str) -> bool:
    """Returns whether files stack the experts of layers with this prefix, by projection (Qwen3.5)."""
    return any(name.startswith(prefix) and name.endswith(".mlp.experts.gate_up_proj") for name in names)
