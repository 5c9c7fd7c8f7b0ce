"""Hugging Face names and shapes of the tensors of every architecture with a built-in table.

The source of the names are the modules of the architectures in `transformers`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from verl_mg.models.attention_config import IndexerConfig, LinearConfig
from verl_mg.models.hf_config import (
    ExpertsConfig,
    HFConfig,
    LatentConfig,
    MultiTokenConfig,
    names_of_tensors,
    stacks_experts,
)
from verl_mg.models.tensor_tree import (
    MLP,
    Experts,
    GroupedAttention,
    Indexer,
    LatentAttention,
    LayerSpec,
    LinearAttention,
    ModelSpec,
    MultiTokenSpec,
    Stack,
    TensorSpec,
)

LAYER = "model.layers.{layer}."  # prefix of a layer's tensors, where the model is not part of a vision-language model
QWEN_MULTI_TOKEN = "mtp."  # prefix of the layer of multi-token prediction of Qwen's models with linear attention
ATTENTION, LINEAR_ATTENTION, FEED_FORWARD = LAYER + "self_attn.", LAYER + "linear_attn.", LAYER + "mlp."
# {architecture: (prefix of the experts, names of gate, up and down)} where they differ from other architectures'.
EXPERT_NAMES = dict.fromkeys(("mixtral", "minimax_m2"), (LAYER + "block_sparse_moe.", "w1", "w3", "w2"))
MULTI_TOKEN_ARCHITECTURES = frozenset({"deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
# {tensor of the layer: the tensor of the model that it repeats}. The layer shares them with the model
# (arXiv:2412.19437, section 2.2), and engines do not read the copies; Qwen's models have none.
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
# Parts of the layer in Qwen's models. One with further parts, such as an embedding, is another layer.
QWEN_PARTS = frozenset({"fc", "layers", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"})


def model_spec(c: HFConfig) -> ModelSpec:
    """Returns the tensors of a model's checkpoint."""
    embedding = TensorSpec(c.prefix + "embed_tokens.weight", (c.vocab, c.hidden))
    kinds = [(c.has_experts(layer), c.has_linear_attention(layer), c.has_indexer(layer)) for layer in range(c.layers)]
    prefix = c.prefix + LAYER.removeprefix("model.")
    # One specification for each kind of layer: names have {layer} as placeholder.
    layers = {kind: _renamed(_layer(c, *kind), LAYER, prefix) for kind in set(kinds)}
    return ModelSpec(
        embedding,
        tuple(layers[kind] for kind in kinds),
        TensorSpec(c.prefix + "norm.weight", (c.hidden,)),
        embedding if c.tied else TensorSpec("lm_head.weight", (c.vocab, c.hidden)),
        _multi_token(c, c.multi_token) if c.multi_token else None,
    )


def _multi_token(c: HFConfig, multi_token: MultiTokenConfig) -> MultiTokenSpec:
    experts = replace(c.experts, stacked=multi_token.stacked) if c.experts else None
    layer = _layer(replace(c, experts=experts), c.has_experts(c.layers), with_linear_attention=False)
    # Embedding and output layer are the model's: engines do not read the copies that a checkpoint may have.
    names, prefix = ("enorm", "hnorm", "eh_proj", "shared_head.norm"), LAYER
    if c.linear:  # Qwen's names
        names, prefix = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), QWEN_MULTI_TOKEN
        layer = _renamed(layer, LAYER, QWEN_MULTI_TOKEN + "layers.0.")

    shapes = (c.hidden,), (c.hidden,), (c.hidden, 2 * c.hidden), (c.hidden,)
    embedding_norm, hidden_norm, projection, final_norm = (
        TensorSpec(f"{prefix}{name}.weight", shape) for name, shape in zip(names, shapes, strict=True)
    )
    return MultiTokenSpec(embedding_norm, hidden_norm, projection, layer, final_norm)


def _renamed(spec: Any, prefix: str, other: str) -> Any:
    if prefix == other or spec is None or isinstance(spec, int):
        return spec
    if isinstance(spec, tuple):
        return tuple(_renamed(part, prefix, other) for part in spec)
    if isinstance(spec, TensorSpec):
        stack = spec.stack and replace(spec.stack, name=spec.stack.name.replace(prefix, other, 1))
        return replace(spec, name=spec.name.replace(prefix, other, 1), stack=stack)
    return replace(spec, **{field.name: _renamed(getattr(spec, field.name), prefix, other) for field in fields(spec)})


def _layer(c: HFConfig, with_experts: bool, with_linear_attention: bool, with_indexer: bool = False) -> LayerSpec:
    def norm(name: str) -> TensorSpec:
        return TensorSpec(f"{LAYER}{name}_layernorm.weight", (c.hidden,))

    return LayerSpec(
        input_norm=norm("input"),
        attention=_linear_attention(c.hidden, c.linear)
        if c.linear and with_linear_attention
        else _attention(c, with_indexer),
        after_attention_norm=norm("post_attention") if c.sandwich_norms else None,
        mlp_norm=norm("pre_feedforward" if c.sandwich_norms else "post_attention"),
        mlp=_experts(c, c.experts) if with_experts and c.experts else _mlp(FEED_FORWARD, c.hidden, c.ffn),
        after_mlp_norm=norm("post_feedforward") if c.sandwich_norms else None,
    )


def _attention(c: HFConfig, with_indexer: bool) -> GroupedAttention | LatentAttention:
    return _latent_attention(c, c.latent, c.indexer if with_indexer else None) if c.latent else _grouped_attention(c)


def _grouped_attention(c: HFConfig) -> GroupedAttention:
    width, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    # With an output gate the projection has query and gate of each head one after the other.
    rows = {"q": width * (1 + c.output_gate), "k": kv, "v": kv}
    q, k, v = (TensorSpec(f"{ATTENTION}{x}_proj.weight", (n, c.hidden)) for x, n in rows.items())
    biases = tuple(TensorSpec(f"{ATTENTION}{x}_proj.bias", (n,)) for x, n in rows.items())
    norms = tuple(
        TensorSpec(f"{ATTENTION}{x}_norm.weight", (rows[x] if c.joint_qk_norm else c.head_dim,)) for x in "qk"
    )
    return GroupedAttention(
        q,
        k,
        v,
        out=TensorSpec(ATTENTION + "o_proj.weight", (c.hidden, width)),
        biases=biases if c.qkv_bias else (),
        norms=norms if c.qk_norm else (),
        out_bias=TensorSpec(ATTENTION + "o_proj.bias", (c.hidden,)) if c.output_bias else None,
        sinks=TensorSpec(ATTENTION + "sinks", (c.heads,)) if c.attention_sinks else None,
    )


def _latent_attention(c: HFConfig, latent: LatentConfig, indexer: IndexerConfig | None) -> LatentAttention:
    def tensor(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(f"{ATTENTION}{name}.weight", shape)

    q_rows, low_rank = c.heads * (latent.qk_nope_head_dim + latent.rope_dim), latent.q_rank > 0
    return LatentAttention(
        q=tensor("q_b_proj", q_rows, latent.q_rank) if low_rank else tensor("q_proj", q_rows, c.hidden),
        q_down=tensor("q_a_proj", latent.q_rank, c.hidden) if low_rank else None,
        q_norm=tensor("q_a_layernorm", latent.q_rank) if low_rank else None,
        kv_down=tensor("kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, c.hidden),
        kv_norm=tensor("kv_a_layernorm", latent.kv_rank),
        kv_up=tensor("kv_b_proj", c.heads * (latent.qk_nope_head_dim + latent.v_dim), latent.kv_rank),
        out=tensor("o_proj", c.hidden, c.heads * latent.v_dim),
        indexer=_indexer(c.hidden, latent, indexer) if indexer else None,
    )


def _indexer(hidden: int, latent: LatentConfig, indexer: IndexerConfig) -> Indexer:
    def tensor(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(f"{ATTENTION}indexer.{name}.weight", shape)

    # float32, as in published directories and in the engines.
    norm = [TensorSpec(f"{ATTENTION}indexer.k_norm.{x}", (indexer.head_dim,), "float32") for x in ("weight", "bias")]
    return Indexer(
        q=tensor("wq_b", indexer.heads * indexer.head_dim, latent.q_rank),
        k=tensor("wk", indexer.head_dim, hidden),
        k_norm=(norm[0], norm[1]),
        head_weights=tensor("weights_proj", indexer.heads, hidden),
    )


def _linear_attention(hidden: int, linear: LinearConfig) -> LinearAttention:
    def tensor(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(LINEAR_ATTENTION + name, shape)

    def projection(name: str, rows: int) -> TensorSpec:
        return tensor(f"in_proj_{name}.weight", rows, hidden)

    convolved, width, heads = linear.convolved_width, linear.value_width, linear.value_heads
    qkvz: tuple[TensorSpec, ...]
    ba: tuple[TensorSpec, ...]
    if linear.by_key_head:
        qkvz, ba = (projection("qkvz", convolved + width),), (projection("ba", 2 * heads),)
    else:
        qkvz = projection("qkv", convolved), projection("z", width)
        ba = projection("b", heads), projection("a", heads)
    return LinearAttention(
        qkvz=qkvz,
        ba=ba,
        conv=tensor("conv1d.weight", convolved, 1, linear.kernel),
        dt_bias=tensor("dt_bias", heads),
        a_log=tensor("A_log", heads),
        norm=tensor("norm.weight", linear.value_dim),
        out=tensor("out_proj.weight", hidden, width),
    )


def _mlp(
    prefix: str, hidden: int, ffn: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> MLP:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    gate_up = TensorSpec(gate, (ffn, hidden)), TensorSpec(up, (ffn, hidden))
    return MLP(gate_up, TensorSpec(down, (hidden, ffn)))


def _stacked_experts(hidden: int, experts: ExpertsConfig) -> Experts:
    def tensor(name: str, *shape: int) -> TensorSpec:
        prefix = FEED_FORWARD + "experts."
        return TensorSpec(prefix + "{expert}." + name, shape, stack=Stack(prefix + name))

    # One tensor with alternating rows, as in the engines: halves would be thousands of boxes for each expert.
    each = MLP(
        gate_up=(tensor("gate_up_proj", 2 * experts.ffn, hidden),),
        down=tensor("down_proj", hidden, experts.ffn),
        gate_up_bias=tensor("gate_up_proj_bias", 2 * experts.ffn),
        down_bias=tensor("down_proj_bias", hidden),
    )
    return Experts(
        count=experts.count,
        router=TensorSpec(FEED_FORWARD + "router.weight", (experts.count, hidden)),
        router_bias=None,
        each=each,
        shared=None,
        logit_bias=TensorSpec(FEED_FORWARD + "router.bias", (experts.count,)),
    )


def _experts(c: HFConfig, experts: ExpertsConfig) -> Experts:
    if experts.alternating:
        return _stacked_experts(c.hidden, experts)
    prefix, *names = EXPERT_NAMES.get(c.architecture, (FEED_FORWARD, "gate_proj", "up_proj", "down_proj"))
    bias_prefix = prefix if c.architecture == "minimax_m2" else prefix + "gate."
    # float32 in every runtime: rounded to bfloat16 the bias may choose other experts.
    bias = TensorSpec(bias_prefix + "e_score_correction_bias", (experts.count,), "float32")
    gate, up, down = names
    each = _mlp(prefix + "experts.{expert}.", c.hidden, experts.ffn, (gate, up, down))
    shared = prefix + ("shared_expert" if experts.shared_gate else "shared_experts")
    shared_gate = TensorSpec(f"{shared}_gate.weight", (1, c.hidden)) if experts.shared_gate else None
    return Experts(
        count=experts.count,
        router=TensorSpec(prefix + "gate.weight", (experts.count, c.hidden)),
        router_bias=bias if experts.router_bias else None,
        each=_in_stacks(each, experts.ffn) if experts.stacked else each,
        shared=_mlp(f"{shared}.", c.hidden, experts.shared_ffn) if experts.shared_ffn else None,
        shared_gate=shared_gate if experts.shared_ffn else None,
    )


def _in_stacks(each: MLP, ffn: int) -> MLP:
    """Returns an expert's tensors in files with one tensor of gate and up projections, and one of down projections."""
    gate, up = each.gate_up
    prefix = FEED_FORWARD + "experts."

    def stack(first_row: int) -> Stack:
        return Stack(prefix + "gate_up_proj", False, first_row, 2 * ffn)

    down = Stack(prefix + "down_proj", transposed=False, rows=each.down.shape[0])
    return MLP((replace(gate, stack=stack(0)), replace(up, stack=stack(ffn))), replace(each.down, stack=down))


def with_multi_token_layer(config: HFConfig, folder: Path) -> HFConfig:
    """Returns a configuration with the layer of multi-token prediction, where a directory has exactly one."""
    if config.architecture not in MULTI_TOKEN_ARCHITECTURES:
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
