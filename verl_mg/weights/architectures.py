"""The weights of each architecture, one line a parameter: its Hugging Face tensors and its Megatron shard.

Names with `{layer}` stand once in every layer. Sources: the modules of `transformers` for the Hugging Face
names and shapes, `megatron.core.models.gpt` (local layer specification) for the Megatron side.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_mg.weights.model_config import HFConfig
from verl_mg.weights.rules import FusedRows, HFTensor, Rule, VocabularyRows, columns, replicated

VOCABULARY_MULTIPLE = 8
"""Rows of a vocabulary shard come in eights, which the matrix units of GPUs want."""


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter and the Hugging Face tensors in it."""

    megatron: str
    sources: tuple[HFTensor, ...]
    rule: Rule


@dataclass(frozen=True)
class ModelWeights:
    """All weights of a model: before the layers, in each layer, after the layers."""

    embedding: Weight
    layer: tuple[Weight, ...]
    final_norm: Weight
    output: Weight


def decoder_weights(c: HFConfig) -> ModelWeights:
    """Llama 3, Qwen2.5 and Qwen3: pre-norm decoders with grouped-query attention and a gated MLP."""
    q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attention, mlp = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
    by_query_group, by_rank = FusedRows(c.kv_heads), FusedRows()
    vocabulary = VocabularyRows(VOCABULARY_MULTIPLE)

    def tensor(name: str, *shape: int) -> HFTensor:
        return HFTensor(name, shape)

    embedding = tensor("model.embed_tokens.weight", c.vocab, c.hidden)
    layer = [
        Weight(
            "input_layernorm.weight",
            (tensor("model.layers.{layer}.input_layernorm.weight", c.hidden),),
            replicated,
        ),
        Weight(
            "self_attention.linear_qkv.weight",
            (
                tensor(attention + "q_proj.weight", q_rows, c.hidden),
                tensor(attention + "k_proj.weight", kv_rows, c.hidden),
                tensor(attention + "v_proj.weight", kv_rows, c.hidden),
            ),
            by_query_group,
        ),
        Weight(
            "self_attention.linear_proj.weight", (tensor(attention + "o_proj.weight", c.hidden, q_rows),), columns
        ),
        Weight(
            "pre_mlp_layernorm.weight",
            (tensor("model.layers.{layer}.post_attention_layernorm.weight", c.hidden),),
            replicated,
        ),
        Weight(
            "mlp.linear_fc1.weight",
            (tensor(mlp + "gate_proj.weight", c.ffn, c.hidden), tensor(mlp + "up_proj.weight", c.ffn, c.hidden)),
            by_rank,
        ),
        Weight("mlp.linear_fc2.weight", (tensor(mlp + "down_proj.weight", c.hidden, c.ffn),), columns),
    ]
    if c.qkv_bias:
        sources = (
            tensor(attention + "q_proj.bias", q_rows),
            tensor(attention + "k_proj.bias", kv_rows),
            tensor(attention + "v_proj.bias", kv_rows),
        )
        layer.append(Weight("self_attention.linear_qkv.bias", sources, by_query_group))
    if c.qk_norm:
        layer += [
            Weight("self_attention.q_layernorm.weight", (tensor(attention + "q_norm.weight", c.head_dim),), replicated),
            Weight("self_attention.k_layernorm.weight", (tensor(attention + "k_norm.weight", c.head_dim),), replicated),
        ]
    output = embedding if c.tied else tensor("lm_head.weight", c.vocab, c.hidden)
    return ModelWeights(
        embedding=Weight("embedding.word_embeddings.weight", (embedding,), vocabulary),
        layer=tuple(layer),
        final_norm=Weight("decoder.final_layernorm.weight", (tensor("model.norm.weight", c.hidden),), replicated),
        output=Weight("output_layer.weight", (output,), vocabulary),
    )


ARCHITECTURES = {"llama": decoder_weights, "qwen2": decoder_weights, "qwen3": decoder_weights}
