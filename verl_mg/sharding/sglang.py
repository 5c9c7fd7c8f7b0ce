"""Rules of SGLang 0.5 for the table of the engines."""

from __future__ import annotations

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import HFConfig
from verl_mg.sharding.engine_table import DATA_PARALLEL_ATTENTION, EngineRules, PipelineEnds

OUTPUT_ON_EVERY_STAGE = frozenset({"glm4_moe", "glm4_moe_lite", "gpt_oss", "llama", "mixtral", "qwen3_moe"})
"""Architectures whose model class builds an output layer on every pipeline stage, and uses the last one."""
EMBEDDING_ON_EVERY_STAGE = frozenset({"minimax_m2"})
"""Architectures whose model class builds an embedding on every pipeline stage, and uses the first one."""
SWIGLU_ALPHA = 1.702
"""Constant of gpt-oss's activation, which SGLang does not read from config.json under the name that it has there."""
WITHOUT_PIPELINE = frozenset({"gemma2", "qwen3_next"})  # architectures without pipeline parallelism in SGLang
EXPERTS_IN_EVERY_LAYER = frozenset({"qwen3_moe", "qwen3_next"})  # architectures whose model class has no dense layers


def check_supported(config: HFConfig, layout: EngineLayout) -> None:
    """Raises a UserError where SGLang's model class of the architecture does not support a layout."""
    if layout.adp > 1 and config.architecture not in DATA_PARALLEL_ATTENTION:
        raise UserError(
            f"rollout.layout={layout}: SGLang has no data-parallel attention for {config.architecture}. Leave out adp."
        )
    if layout.pp > 1 and config.architecture in WITHOUT_PIPELINE:
        raise UserError(
            f"rollout.layout={layout}: SGLang has no pipeline parallelism for {config.architecture}. Leave out pp."
        )
    if config.architecture == "gpt_oss":
        _check_gpt_oss(config, layout)
    if config.architecture in EXPERTS_IN_EVERY_LAYER and not all(map(config.has_experts, range(config.layers))):
        raise UserError(
            f"rollout.engine=sglang: SGLang builds experts in every layer of {config.architecture}, but this model has "
            "dense layers among them. Use rollout.engine=hf."
        )


def _check_gpt_oss(config: HFConfig, layout: EngineLayout) -> None:
    if layout.ep > 1:
        raise UserError(
            f"rollout.layout={layout}: SGLang cannot distribute unquantized experts of gpt_oss. Leave out ep."
        )
    if config.experts and config.experts.clamped and config.experts.clamped.alpha != SWIGLU_ALPHA:
        raise UserError(
            f"rollout.engine=sglang: SGLang computes swiglu_alpha={SWIGLU_ALPHA}, but this model has "
            f"{config.experts.clamped.alpha}. Use rollout.engine=hf."
        )


def pipeline_ends(config: HFConfig, tied: bool, first: bool, last: bool) -> PipelineEnds:
    """Returns what a pipeline stage has besides its layers; on the first one, a tied output layer is no parameter."""
    has_output = last or config.architecture in OUTPUT_ON_EVERY_STAGE
    has_embedding = first or config.architecture in EMBEDDING_ON_EVERY_STAGE
    return PipelineEnds(embedding=has_embedding, final_norm=last, output=has_output and not (tied and first))


RULES = EngineRules(
    name="SGLang",
    experts="experts.",
    expert_bias="weight_bias",
    attention=dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), ""),
    embedding={},
    fused_indexer=False,
    latent_down="fused_qkv_a_proj_with_mqa",
    check_supported=check_supported,
    pipeline_ends=pipeline_ends,
)
