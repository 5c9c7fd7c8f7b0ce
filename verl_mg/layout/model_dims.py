"""The dimensions of a model that layouts divide."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelDims:
    """Counts and widths of a model; what it has not is 0."""

    attention_heads: int
    kv_heads: int
    layers: int
    ffn: int
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
