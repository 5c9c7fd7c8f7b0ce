"""Layer of multi-token prediction (MTP) of a model directory, which engines can use for speculative decoding."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from verl_mg.models.hf_config import HFConfig, MultiTokenConfig

ARCHITECTURES = frozenset({"deepseek_v3", "glm4_moe"})
"""Architectures whose checkpoints can have such a layer behind the others."""
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""{tensor of the layer: the tensor of the model that it repeats}. The layer shares them with the model
(arXiv:2412.19437, section 2.2), and engines do not read the copies."""


def with_multi_token_layer(config: HFConfig, folder: Path) -> HFConfig:
    """Returns a configuration with the layer of multi-token prediction, where a directory has exactly one.

    `transformers` neither loads nor saves it, so config.json alone does not say whether it is there.

    Args:
        config: configuration of the model.
        folder: model directory.
    """
    if config.architecture not in ARCHITECTURES or config.experts is None:
        return config
    names = _names_of_tensors(folder)
    if _projection(config.layers) not in names or _projection(config.layers + 1) in names:
        return config
    has_copies = all(f"model.layers.{config.layers}.{name}" in names for name in COPIES)
    return replace(config, multi_token=MultiTokenConfig(has_copies))


def copied_tensors(config: HFConfig) -> dict[str, str]:
    """Returns {tensor of the layer: tensor of the model} for the tensors that a checkpoint contains a second time."""
    if config.multi_token is None or not config.multi_token.has_copies:
        return {}
    return {f"model.layers.{config.layers}.{name}": original for name, original in COPIES.items()}


def _projection(layer: int) -> str:
    return f"model.layers.{layer}.eh_proj.weight"


def _names_of_tensors(folder: Path) -> Collection[str]:
    """Returns the names in the index of a directory, or in its only file; () where it has neither."""
    try:
        index = folder / "model.safetensors.index.json"
        if index.exists():
            return frozenset(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        with open(folder / "model.safetensors", "rb") as file:
            return frozenset(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    except (OSError, ValueError, LookupError, TypeError):  # reported where the weights are read
        return ()
