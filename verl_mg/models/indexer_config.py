"""Sparse attention: the sizes of its indexer, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_mg.errors import UserError


@dataclass(frozen=True)
class IndexerConfig:
    """Indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1), which selects the keys of a query."""

    heads: int  # heads of its queries; one key serves all
    head_dim: int  # width of a head in elements; as many of its first ones have rotary embedding as in latent attention
    top_k: int  # keys that a query attends to at most
    interleaved: bool
    """Whether the two elements that are rotated together are neighbours; otherwise they are half the width apart."""


def parse_indexer(raw: dict[str, Any], layers: int, where: str) -> IndexerConfig:
    """Parses the fields of sparse attention; UserError where layers share a selection or queries have no low rank."""
    interleaved = raw["model_type"] == "glm_moe_dsa"
    if bool(raw.get("indexer_rope_interleave")) != interleaved:
        raise UserError(
            f"{where}: indexer_rope_interleave={raw.get('indexer_rope_interleave')} is not that of model_type "
            f"{raw['model_type']!r} in transformers. Write {str(interleaved).lower()}."
        )
    # A shared selection would have to cross pipeline stages.
    if _shares_selections(raw, layers):
        raise UserError(
            f"{where}: layers that attend to the keys that an earlier layer selected (index_topk_freq, "
            "index_topk_pattern or indexer_types) are not supported. Use a model whose layers each have an indexer."
        )
    if not raw.get("q_lora_rank"):
        raise UserError(f"{where}: q_lora_rank is missing, which the indexer needs. Use the model's own config.json.")
    indexer = IndexerConfig(
        heads=int(raw["index_n_heads"]),
        head_dim=int(raw["index_head_dim"]),
        top_k=int(raw["index_topk"]),
        interleaved=interleaved,
    )
    if indexer.head_dim < int(raw["qk_rope_head_dim"]):
        raise UserError(
            f"{where}: index_head_dim={indexer.head_dim} is below qk_rope_head_dim={raw['qk_rope_head_dim']}, the "
            "width of the rotary embedding. Correct one of them."
        )
    return indexer


def _shares_selections(raw: dict[str, Any], layers: int) -> bool:
    # Some layer has no indexer (IndexCache, arXiv:2603.12201), for transformers or for engines.
    pattern: Sequence[str] = raw.get("index_topk_pattern") or ()
    frequency, offset = int(raw.get("index_topk_freq") or 1), int(raw.get("index_skip_topk_offset") or 2)
    by_frequency = not pattern and any(max(layer - offset + 1, 0) % frequency for layer in range(layers))
    return by_frequency or not {"F", "full"}.issuperset([*pattern, *(raw.get("indexer_types") or ())])
