"""Tiny models of every family that is traced, and what the engines' own loaders make of them.

    sglang_traces([("qwen3", EngineLayout(tp=2))])["qwen3", EngineLayout(tp=2)][rank] -> {parameter: Shard}

A folder of one's own: `verl_mg.tracing.tracer.trace`.
"""

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import warm_start
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_families import VISION_LANGUAGE
from verl_mg.sharding.boxes import Shard
from verl_mg.tracing.tracer import TracedEngine, trace

needs_sglang, needs_vllm = pytest.mark.needs(sglang=True), pytest.mark.needs(vllm=True)

COMMON: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# What the published configurations have and SGLang asks for, but transformers does not write by itself, comes too.
DEEPSEEK = EXPERTS | {
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    },
}
V2 = DEEPSEEK | {"topk_method": "greedy", "scoring_func": "softmax"}
V3 = DEEPSEEK | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
GLM = EXPERTS | {
    "num_hidden_layers": 4,  # vLLM's classes need experts on every stage
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
FLASH = DEEPSEEK | {"num_hidden_layers": 4, "n_shared_experts": 1, "n_group": 1, "rope_parameters": None}
SPARSE = {
    "num_hidden_layers": 4,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 0,
    "index_n_heads": 4,
    "index_head_dim": 128,  # the width that the engines' kernels have
    "index_topk": 8,
}
MINIMAX = {
    "head_dim": 16,
    "rotary_dim": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
}

LINEAR = {
    "head_dim": 16,
    "full_attention_interval": 3,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "shared_expert_intermediate_size": 24,
}

VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"head_dim": 16, "num_experts": 8, "mlp_only_layers": []}),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "deepseek_v2": ("deepseek_v2", V2),
    "deepseek_v2_lite": ("deepseek_v2", V2 | {"q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", V3),
    "glm4_moe": ("glm4_moe", GLM | {"attention_bias": True, "use_qk_norm": True}),
    "glm4_moe_lite": ("glm4_moe_lite", FLASH),
    "deepseek_v32": ("deepseek_v32", V3 | SPARSE),
    # SGLang has its plain rotary embedding on GPUs only. A layer that shares the selection of the one before it.
    "glm_moe_dsa": (
        "glm_moe_dsa",
        V3
        | SPARSE
        | {"n_group": 1, "indexer_rope_interleave": True}
        | {"indexer_types": ["full", "full", "shared", "full"]},
    ),
    "minimax_m2": ("minimax_m2", MINIMAX),
    "uneven": ("llama", {"vocab_size": 200, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen3_next": ("qwen3_next", LINEAR | EXPERTS | {"num_experts": 8}),
    "qwen3_5": ("qwen3_5_text", LINEAR),
    "qwen3_5_moe": ("qwen3_5_moe_text", LINEAR | EXPERTS | {"num_experts": 8}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 32, "hidden_act": "gelu_pytorch_tanh"}),
    # A width that vLLM's kernels for the CPU take on four ranks.
    "gpt_oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 128,
            "rope_parameters": DEEPSEEK["rope_parameters"] | {"truncate": False},
        },
    ),
}
"""Family -> the model type of transformers, and what its configuration has beyond `COMMON`."""

WITH_VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_vision": ("qwen3_5", LINEAR),
    "qwen3_5_moe_vision": ("qwen3_5_moe", LINEAR | EXPERTS | {"num_experts": 8}),
}
"""The same for vision-language models, of which the weight tables have the language model."""
WITHOUT_TABLE: dict[str, tuple[str, dict[str, Any]]] = {"olmo2": ("olmo2", {})}
"""The same for models that the weight tables do not know."""

DEEPSEEK_MIXTURES = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3")
GLM_AND_MINIMAX = ("glm4_moe", "glm4_moe_lite", "minimax_m2", "deepseek_v32", "glm_moe_dsa")
MIXTURES = ("qwen3_moe", "mixtral", *DEEPSEEK_MIXTURES, *GLM_AND_MINIMAX, "qwen3_next", "qwen3_5_moe")
ATTENTION_DP = ("qwen3", "qwen3_moe", *DEEPSEEK_MIXTURES, *GLM_AND_MINIMAX, "qwen3_next", "qwen3_5", "qwen3_5_moe")
VISION_LAYOUTS = {
    "qwen3_5_vision": (EngineLayout(tp=2), EngineLayout(pp=2), EngineLayout(tp=2, adp=2)),
    "qwen3_5_moe_vision": (EngineLayout(tp=2, ep=2), EngineLayout(pp=2), EngineLayout(tp=4, ep=4, adp=2)),
}
"""The layouts in which a vision-language model is traced, the first of them daily."""


ONE_STAGE = ("gemma2", "qwen3_next")
"""Families that SGLang does not cut into stages."""
DAILY: dict[str, list[EngineLayout]] = {
    "qwen3": [EngineLayout(), EngineLayout(tp=4), EngineLayout(tp=2, pp=2), EngineLayout(tp=2, adp=2)],
    "qwen2_tied": [EngineLayout(tp=2, pp=2)],
    "qwen3_moe": [EngineLayout(tp=2, pp=2), EngineLayout(tp=2, ep=2), EngineLayout(tp=4, ep=4, adp=2)],
    "deepseek_v3": [EngineLayout(tp=2, pp=2), EngineLayout(tp=2, ep=2), EngineLayout(tp=4, ep=4, adp=2)],
    "qwen3_next": [EngineLayout(tp=4), EngineLayout(tp=2, ep=2), EngineLayout(tp=4, ep=4, adp=2)],
    "uneven": [EngineLayout(tp=3)],
}
"""The daily layouts of a family of each kind, which cut in all ways: dense, tied, mixture, with latent and with linear
attention, and with a vocabulary of which the last rank has none."""


def layouts_of(family: str) -> list[EngineLayout]:
    """The layouts in which SGLang loads a family daily: one that cuts all its layers, or those of its kind."""
    return DAILY.get(family, [EngineLayout(tp=2, ep=2) if family in MIXTURES else EngineLayout(tp=2)])


def nightly_layouts_of(family: str) -> list[EngineLayout]:
    """The other layouts in which SGLang loads a family."""
    layouts = _layouts_of(family)
    if family in MIXTURES:
        layouts += [EngineLayout(tp=4, ep=2)]
    if family in ATTENTION_DP:
        layouts += [EngineLayout(tp=4, adp=2)]
    return [layout for layout in layouts if layout not in layouts_of(family)]


def _layouts_of(family: str) -> list[EngineLayout]:
    """The layouts of all sizes; at tp4 there are fewer key-value heads than ranks."""
    if family == "uneven":  # a vocabulary of which the last rank has none
        return [EngineLayout(tp=3)]
    layouts = [EngineLayout(), EngineLayout(tp=2), EngineLayout(tp=4)]
    if family not in ONE_STAGE:
        layouts += [EngineLayout(pp=2), EngineLayout(tp=2, pp=2)]
    if family in MIXTURES:
        layouts += [EngineLayout(tp=2, ep=2)]
    if family in ATTENTION_DP:
        layouts += [EngineLayout(tp=2, adp=2)]
    if family in MIXTURES and family in ATTENTION_DP:
        layouts += [EngineLayout(tp=4, ep=4, adp=2)]
    return layouts


def vllm_layouts_of(family: str) -> list[EngineLayout]:
    """The layouts in which vLLM loads a family: experts are on all ranks of a stage, or none are distributed."""
    if family == "uneven":  # its 256 padded rows cannot be divided by 3
        return []
    layouts = [EngineLayout(), EngineLayout(tp=2), EngineLayout(tp=4), EngineLayout(pp=2), EngineLayout(tp=2, pp=2)]
    if family == "gpt_oss":  # which needs a key-value head on each rank
        return [*(layout for layout in layouts if layout.tp <= 2), EngineLayout(tp=2, ep=2)]
    return layouts + ([EngineLayout(tp=2, ep=2), EngineLayout(tp=4, ep=4)] if family in MIXTURES else [])


@cache
def folder_of(family: str) -> Path:
    """A directory with the family's config.json and no weights: shapes are all that a trace needs."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    model_type, own = (FAMILIES | WITH_VISION | WITHOUT_TABLE)[family]
    folder = Path(tempfile.mkdtemp(prefix=f"{family}-"))
    fields = COMMON | own
    if model_type in VISION_LANGUAGE:
        fields |= {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}  # keeps the interval
        config = AutoConfig.for_model(model_type, text_config=fields, vision_config=VISION)
        config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].__name__]
        config.save_pretrained(folder)
        return folder
    config = AutoConfig.for_model(model_type, **fields)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)
    return change_config(folder, folder, **{name: value for name, value in own.items() if not hasattr(config, name)})


def change_config(source: Path, folder: Path, **fields: Any) -> Path:
    """A copy of a directory's config.json with other fields; None takes one out."""
    config = json.loads((source / "config.json").read_text()) | fields
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


Traced = tuple[str, EngineLayout]


def sglang_traces(traced: Sequence[Traced]) -> dict[Traced, list[dict[str, Shard]]]:
    """Shards of each rank of each family and layout as SGLang loads them, traced with one set of processes."""
    return _traces(traced, TracedEngine("sglang"))


def vllm_traces(traced: Sequence[Traced]) -> dict[Traced, list[dict[str, Shard]]]:
    """The same as vLLM loads them."""
    return _traces(traced, TracedEngine("vllm", Path(warm_start.vllm().python)))


def _traces(traced: Sequence[Traced], engine: TracedEngine) -> dict[Traced, list[dict[str, Shard]]]:
    traces = trace([(folder_of(family), layout) for family, layout in traced], engine)
    return dict(zip(traced, traces, strict=True))
