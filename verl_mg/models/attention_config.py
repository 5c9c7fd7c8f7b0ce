"""Sizes of linear and of sparse attention, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from verl_mg.errors import UserError

LAYER_TYPES = ("linear_attention", "full_attention")  # kinds of layers by their names in config.json


def layer_types(raw: dict[str, Any], kinds: tuple[str, str], default: Sequence[int], where: str) -> Sequence[str]:
    """Returns the kind of each layer, by default that with the number in `default`; UserError for an unknown one."""
    named: Sequence[str] = raw.get("layer_types") or [kinds[number] for number in default]
    if len(named) != len(default) or not set(kinds).issuperset(named):
        raise UserError(
            f"{where}: layer_types={named} is not supported. Write {' or '.join(map(repr, kinds))} for each of the "
            f"{len(default)} layers."
        )
    return named


@dataclass(frozen=True)
class LinearConfig:
    """Gated delta net (arXiv:2412.06464): linear attention with a state of keys times values for each value head.

    Several value heads share the query and the key of one key head. Widths are in elements.
    """

    layers: frozenset[int]  # indices of the layers with linear attention; the others have softmax attention
    key_heads: int  # heads of queries and keys
    value_heads: int  # heads of values, a multiple of the key heads
    key_dim: int  # width of a head of queries or keys
    value_dim: int  # width of a head of values
    kernel: int  # tokens that the convolution of queries, keys and values reads, the current one included
    # Whether the checkpoint has two input projections whose rows are in the order of key heads (Qwen3-Next), and not
    # four with the rows of queries, keys and values one after the other (Qwen3.5).
    by_key_head: bool

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def key_width(self) -> int:
        """Width of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of the values of all heads."""
        return self.value_heads * self.value_dim

    @property
    def convolved_width(self) -> int:
        """Width of queries, keys and values, which the convolution reads."""
        return 2 * self.key_width + self.value_width


def parse_linear(raw: dict[str, Any], layers: int, where: str) -> LinearConfig:
    """Parses the fields of linear attention; UserError for unknown kinds of layers or numbers of heads."""
    interval = int(raw["full_attention_interval"])
    kinds = layer_types(raw, LAYER_TYPES, [(layer + 1) % interval == 0 for layer in range(layers)], where)
    linear = LinearConfig(
        layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == LAYER_TYPES[0]),
        key_heads=int(raw["linear_num_key_heads"]),
        value_heads=int(raw["linear_num_value_heads"]),
        key_dim=int(raw["linear_key_head_dim"]),
        value_dim=int(raw["linear_value_head_dim"]),
        kernel=int(raw["linear_conv_kernel_dim"]),
        by_key_head=raw["model_type"] == "qwen3_next",
    )
    if linear.value_heads % linear.key_heads:
        raise UserError(
            f"{where}: linear_num_value_heads={linear.value_heads} is not a multiple of linear_num_key_heads="
            f"{linear.key_heads}. Use the model's own config.json."
        )
    return linear


@dataclass(frozen=True)
class IndexerConfig:
    """Indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1), which selects the keys of a query."""

    heads: int  # heads of its queries; one key serves all
    head_dim: int  # width of a head in elements; as many of its first ones have rotary embedding as in latent attention
    top_k: int  # keys that a query attends to at most
    interleaved: bool
    """Whether the two elements that are rotated together are neighbours; otherwise they are half the width apart."""
    sources: tuple[int, ...]
    """For each layer, the one whose indexer selects its keys (IndexCache, arXiv:2603.12201): itself, or the last one
    before it that has an indexer."""

    @property
    def selecting(self) -> tuple[int, ...]:
        """Layers with an indexer, ascending."""
        return tuple(sorted(set(self.sources)))

    def has_indexer(self, layer: int) -> bool:
        """Returns whether a layer has an indexer; others attend to the keys that an earlier one selected."""
        return self.sources[layer] == layer

    def shared(self, layer: int) -> int | None:
        """Returns the earlier layer whose selection a layer shares; None where it has an indexer, or does not exist."""
        return None if layer >= len(self.sources) or self.has_indexer(layer) else self.sources[layer]


def parse_indexer(raw: dict[str, Any], layers: int, where: str) -> IndexerConfig:
    """Parses the fields of sparse attention; UserError where the first layer has no indexer or queries no low rank."""
    interleaved = raw["model_type"] == "glm_moe_dsa"
    if bool(raw.get("indexer_rope_interleave")) != interleaved:
        raise UserError(
            f"{where}: indexer_rope_interleave={raw.get('indexer_rope_interleave')} is not that of model_type "
            f"{raw['model_type']!r} in transformers. Write {str(interleaved).lower()}."
        )
    kinds = _indexer_kinds(raw, layers)
    if len(kinds) < layers or not {"full", "shared"}.issuperset(kinds) or kinds[0] == "shared":
        raise UserError(
            f"{where}: indexer_types, index_topk_pattern or index_topk_freq make the layers {kinds}. Write 'full' or "
            f"'shared' for each of the {layers} layers, and 'full' for the first."
        )
    if not interleaved and "shared" in kinds:
        raise UserError(
            f"{where}: layers that attend to the keys that an earlier layer selected (index_topk_freq, "
            f"index_topk_pattern or indexer_types) are not supported for model_type {raw['model_type']!r}. Leave the "
            "field out."
        )
    if not raw.get("q_lora_rank"):
        raise UserError(f"{where}: q_lora_rank is missing, which the indexer needs. Use the model's own config.json.")
    indexer = IndexerConfig(
        heads=int(raw["index_n_heads"]),
        head_dim=int(raw["index_head_dim"]),
        top_k=int(raw["index_topk"]),
        interleaved=interleaved,
        sources=tuple(accumulate(range(layers), lambda last, layer: layer if kinds[layer] == "full" else last)),
    )
    if indexer.head_dim < int(raw["qk_rope_head_dim"]):
        raise UserError(
            f"{where}: index_head_dim={indexer.head_dim} is below qk_rope_head_dim={raw['qk_rope_head_dim']}, the "
            "width of the rotary embedding. Correct one of them."
        )
    return indexer


def _indexer_kinds(raw: dict[str, Any], layers: int) -> list[str]:
    """Returns for each layer whether it has an indexer, "full", or not, "shared", as transformers and SGLang do."""
    if (named := raw.get("indexer_types")) is not None:
        return list(named)
    if (pattern := raw.get("index_topk_pattern")) is not None:
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    frequency, offset = int(raw.get("index_topk_freq") or 1), int(raw.get("index_skip_topk_offset") or 2)
    return ["shared" if max(layer - offset + 1, 0) % frequency else "full" for layer in range(layers)]
