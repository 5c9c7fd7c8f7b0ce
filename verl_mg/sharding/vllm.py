"""Rules of vLLM 0.32 for the table of the engines."""

from __future__ import annotations

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import ClampedSwiGLU, HFConfig
from verl_mg.sharding.engine_table import VOCABULARY, EngineRules, PipelineEnds

SWIGLU = ClampedSwiGLU(alpha=1.702, limit=7.0)
"""Activation of gpt-oss's experts in vLLM, which does not read it from config.json."""
# A parameter that a stage builds without using it belongs to the table: an update that leaves one out is an error.
ENDS_ON_EVERY_STAGE = frozenset({"gemma2", "gpt_oss", "mixtral", "qwen3_moe"})
"""Architectures whose model class builds embedding, final norm and output layer on every pipeline stage."""
EXPERTS_ON_EVERY_STAGE = frozenset({"glm4_moe", "glm4_moe_lite"})
"""Architectures whose model class refuses a pipeline stage without experts."""
ALL_BUT_NORM_ON_EVERY_STAGE = frozenset({"qwen3_next"})
"""Architectures whose model class builds embedding and output layer on every pipeline stage."""
EMBEDDING_ON_EVERY_STAGE = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
"""Architectures whose model class builds the embedding on every pipeline stage."""


# What vLLM would refuse or compute wrongly, checked before anything starts.
def check_supported(config: HFConfig, layout: EngineLayout) -> None:
    """Raises a UserError where vLLM's model class of the architecture does not support a layout."""
    if layout.adp > 1:
        raise UserError(
            f"rollout.layout={layout}: vLLM has no data-parallel attention inside an engine. Leave out adp."
        )
    if layout.ep not in (1, layout.tp):
        raise UserError(
            f"rollout.layout={layout}: vLLM distributes experts over all ranks of a stage or none. Write "
            f"ep{layout.tp}, or leave out ep."
        )
    if config.with_vision:
        raise UserError(
            f"rollout.engine=vllm: there is no built-in table of the vision-language class of {config.architecture}. "
            "Run verl-mg trace, and set rollout.sharding_table to its file, or use rollout.engine=sglang."
        )
    if (rows := VOCABULARY.padded(config.vocab, 1)) % layout.tp:
        raise UserError(
            f"rollout.layout={layout}: vLLM pads the vocabulary to {rows} rows, which tp{layout.tp} does not divide. "
            "Choose another tp, or write rollout.engine=sglang."
        )
    if config.architecture in EXPERTS_ON_EVERY_STAGE and config.experts:
        for stage in range(layout.pp):
            if config.experts.layers.isdisjoint(layout.layers(config.layers, stage)):
                raise UserError(
                    f"rollout.layout={layout}: vLLM's model class of {config.architecture} has no pipeline stage "
                    f"without experts, and stage {stage} would have dense layers only. Choose a smaller pp."
                )
    if config.architecture == "gpt_oss":
        _check_gpt_oss(config, layout)
    if config.architecture == "qwen2" and config.head_dim * config.heads != config.hidden:
        raise UserError(
            "rollout.engine=vllm: vLLM's model class of qwen2 has heads of size hidden_size / num_attention_heads, but "
            f"this model of size {config.head_dim}. Use rollout.engine=hf."
        )
    if config.architecture == "gemma2" and not config.tied:
        raise UserError(
            "rollout.engine=vllm: vLLM's model class of gemma2 has no output layer besides the embedding, but this "
            "model has one. Use rollout.engine=hf."
        )


def _check_gpt_oss(config: HFConfig, layout: EngineLayout) -> None:
    if layout.tp > config.kv_heads:
        raise UserError(
            f"rollout.layout={layout}: vLLM's model class of gpt_oss needs a key-value head on each rank, but the "
            f"model has {config.kv_heads}. Choose tp from {config.kv_heads} down."
        )
    windows = [config.window(layer) is not None for layer in range(config.layers)]
    experts = config.experts
    if windows != [layer % 2 == 0 for layer in range(config.layers)] or (experts and experts.clamped != SWIGLU):
        raise UserError(
            "rollout.engine=vllm: vLLM's model class of gpt_oss has a window in every other layer, from the first, and "
            f"swiglu_alpha={SWIGLU.alpha} and swiglu_limit={SWIGLU.limit}, which this model has not. Use "
            "rollout.engine=hf."
        )


def pipeline_ends(config: HFConfig, tied: bool, first: bool, last: bool) -> PipelineEnds:
    """Returns what a pipeline stage has besides its layers; the last stage too has a tied embedding."""
    kind = config.architecture
    output_everywhere = kind in ENDS_ON_EVERY_STAGE | ALL_BUT_NORM_ON_EVERY_STAGE
    return PipelineEnds(
        embedding=output_everywhere or kind in EMBEDDING_ON_EVERY_STAGE or first or (tied and last),
        final_norm=kind in ENDS_ON_EVERY_STAGE or last,
        output=(output_everywhere or last) and not tied,
    )


RULES = EngineRules(
    name="vLLM",
    experts="experts.routed_experts.",
    expert_bias="bias",
    attention={"gpt_oss": "attn."},
    embedding={"gpt_oss": "embedding"},
    fused_indexer=True,
    latent_down="fused_qkv_a_proj",
    check_supported=check_supported,
    pipeline_ends=pipeline_ends,
)
