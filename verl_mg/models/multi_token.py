"""Layer of multi-token prediction (MTP) of a model directory, which engines can use for speculative decoding."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from verl_mg.models.hf_config import HFConfig, MultiTokenConfig, names_of_tensors, stacks_experts
from verl_mg.models.hf_tensors import QWEN_MULTI_TOKEN

ARCHITECTURES = frozenset({"deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
# {tensor of the layer: the tensor of the model that it repeats}. The layer shares them with the model
# (arXiv:2412.19437, section 2.2), and engines do not read the copies; Qwen's models have none.
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
# Parts of the layer in Qwen's models. One with further parts, such as an embedding, is another layer.
QWEN_PARTS = frozenset({"fc", "layers", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"})


def with_multi_token_layer(config: HFConfig, folder: Path) -> HFConfig:
    """Returns a configuration with the layer of multi-token prediction, where a directory has exactly one."""
    if config.architecture not in ARCHITECTURES:
        return config
    # The names of its tensors decide, not config.json: `transformers` neither loads nor saves the layer, so a
    # directory that it wrote has the field but not the layer.
    names = names_of_tensors(folder)
    if config.linear:
        return replace(config, multi_token=_qwen_layer(names))
    # Directories with two such layers are read without them: no published model has more than one.
    further = replace(config, layers=config.layers + 1)
    if config.experts is None or projection(config) not in names or projection(further) in names:
        return config
    # Exports write the model's tensors in place of the copies.
    has_copies = all(f"model.layers.{config.layers}.{name}" in names for name in COPIES)
    return replace(config, multi_token=MultiTokenConfig(has_copies))


def copied_tensors(config: HFConfig) -> dict[str, str]:
    """Returns {tensor of the layer: tensor of the model} for the tensors that a checkpoint contains a second time."""
    if config.multi_token is None or not config.multi_token.has_copies:
        return {}
    return {f"model.layers.{config.layers}.{name}": original for name, original in COPIES.items()}


def _qwen_layer(names: Collection[str]) -> MultiTokenConfig | None:
    parts = [name.split(".") for name in names if name.startswith(QWEN_MULTI_TOKEN)]
    layers = {number for _, part, number, *_ in parts if part == "layers"}
    if {part for _, part, *_ in parts} != QWEN_PARTS or layers != {"0"}:
        return None
    return MultiTokenConfig(stacked=stacks_experts(names, QWEN_MULTI_TOKEN))


def projection(config: HFConfig) -> str:
    """Returns the name of the tensor that shows that a directory has such a layer."""
    return f"{QWEN_MULTI_TOKEN}fc.weight" if config.linear else f"model.layers.{config.layers}.eh_proj.weight"
