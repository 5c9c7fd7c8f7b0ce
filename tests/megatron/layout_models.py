"""Tiny models that 8 ranks can hold under every layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.tiny_models import CHARACTERS, VARIANTS
from verl_mg.models.tiny_model import make_tiny_model

LOW_RANK_QUERIES = "deepseek_v2 with low-rank queries"  # a configuration of `conftest.configs`
HALF_HEAD_DIM = 16
"""Width of a head that the kernels of half precision on GPUs have, which is a multiple of 8."""
LATENT_SIZES = {"layers": 5, "head_dim": 8, "init_std": 0.1}  # smaller weights, that rounding grows less
FEW_HEADS = {"layers": 5, "kv_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    # 6 layers: four chunks are uneven; key-value heads are fewer than heads.
    "dense": {"architecture": "qwen3", "layers": 6, "kv_heads": 4, "head_dim": 12},
    # Two layers are enough without pipeline stages.
    "shallow dense": {"architecture": "qwen3", "layers": 2, "kv_heads": 4, "head_dim": 12},
    # 9 layers, so that eight chunks are uneven; the last stage has an embedding of its own.
    "tied": {"architecture": "qwen2", "layers": 9, "kv_heads": 8, "tie_embeddings": True},
    "mixture": {"architecture": "qwen3_moe", **FEW_HEADS, "experts": 8},
    # One layer without experts, shared experts beside the others.
    "latent": {"architecture": "deepseek_v3", **LATENT_SIZES, **VARIANTS["deepseek_v3"], "q_rank": 16},
    # Compressed queries, one group of experts.
    "latent flash": {"architecture": "glm4_moe_lite", **VARIANTS["glm4_moe_lite"], **LATENT_SIZES, "q_rank": 8},
    # As Moonlight: one group of experts, queries without a low rank.
    "latent without query rank": LATENT_SIZES
    | {"architecture": "deepseek_v3", "shared_experts": 2, "dense_layers": 1, "experts": 8},
    # Selected keys, which every rank needs of all tokens, and which later layers share, on any pipeline stage.
    "sparse": LATENT_SIZES
    | {"architecture": "glm_moe_dsa", **VARIANTS["glm_moe_dsa"], "q_rank": 16, "experts": 4}
    | {"fields": {"indexer_types": ["full", "full", "shared", "shared", "shared"]}},
    # Biases and norms of queries and keys, of which a half is rotated, beside a sigmoid router and shared experts.
    "partly rotated": {"architecture": "glm4_moe", **FEW_HEADS, "ffn": 48, **VARIANTS["glm4_moe"]},
    # Attention sinks, biases and windows; experts in stacked tensors.
    "sinks": {"architecture": "gpt_oss", **FEW_HEADS, "experts": 8, **VARIANTS["gpt_oss"]},
    # Linear and softmax attention in turns, gated, with experts; and without, of which cp8 has no whole key head.
    "linear": VARIANTS["qwen3_next"] | FEW_HEADS | {"architecture": "qwen3_next", "experts": 8, "init_std": 0.05},
    "linear mixture": VARIANTS["qwen3_5_moe_text"]
    | FEW_HEADS
    | {"architecture": "qwen3_5_moe_text", "experts": 8, "init_std": 0.03},
    "linear dense": VARIANTS["qwen3_5_text"] | FEW_HEADS | {"architecture": "qwen3_5_text", "init_std": 0.05},
    # Queries and keys are normalized over all heads, which tensor-parallel ranks divide.
    "joint norms": {"architecture": "minimax_m2", **FEW_HEADS, **VARIANTS["minimax_m2"]},
    "shallow joint norms": {"architecture": "minimax_m2", "layers": 2, "kv_heads": 4, **VARIANTS["minimax_m2"]},
    "capped": {"architecture": "gemma2", **FEW_HEADS, **VARIANTS["gemma2"]},
}


class ModelFolders(dict[str, Path]):
    """Directories of models by name, each made when it is first read: by default those of MODELS."""

    def __init__(self, folder: Path, make: Callable[[Path, str], Path] | None = None) -> None:
        super().__init__()
        self._folder, self._make = folder, make or make_model

    def __missing__(self, name: str) -> Path:
        self[name] = self._make(self._folder / name, name)
        return self[name]


def make_model(folder: Path, name: str, **changes: Any) -> Path:
    """Makes weights large enough that every part of the network shows in the output."""
    sizes = {"hidden": 32, "heads": 8, "ffn": 64, "max_positions": 64, "init_std": 0.2}
    return make_tiny_model(folder, **sizes | MODELS[name] | changes, characters=CHARACTERS, perturb=True, seed=3)
