"""Tensors of a model by their Hugging Face names: as a tree of layers, and as an index by name.

The tables of Megatron, SGLang and `transformers` refer to the fields of this tree, never to names. A name with
`{layer}` exists once for each layer, one with `{expert}` once for each expert of a layer. Source of names and shapes:
the modules of the architectures in `transformers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from verl_mg.models.hf_config import ExpertsConfig, HFConfig, LatentConfig, MultiTokenConfig
from verl_mg.models.indexer_config import IndexerConfig
from verl_mg.models.linear_config import LinearConfig
from verl_mg.models.stacked_tensors import Stack, StackedTensor


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the checkpoint, or of each layer or expert."""

    name: str
    """Hugging Face name, with `{layer}` and `{expert}` as placeholders."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    float32: bool = False
    """Whether the tensor is float32 in every runtime, whatever the dtype of the model."""
    stack: Stack | None = None
    """Tensor in files that stacks it for all experts, see `StackedTensor`; None: a tensor of its own."""

    @property
    def per_expert(self) -> bool:
        """Whether each expert of a layer has such a tensor."""
        return "{expert}" in self.name


@dataclass(frozen=True)
class GroupedAttention:
    """Tensors of grouped-query attention."""

    q: TensorSpec
    """Query projection; with an output gate the rows of each head's query, then those of its gate."""
    k: TensorSpec
    """Key projection."""
    v: TensorSpec
    """Value projection."""
    out: TensorSpec
    """Output projection."""
    biases: tuple[TensorSpec, ...]
    """Biases of q, k and v; empty without."""
    norms: tuple[TensorSpec, ...]
    """Norms of q and k; empty without."""
    out_bias: TensorSpec | None = None
    """Bias of the output projection."""
    sinks: TensorSpec | None = None
    """Score of each query head to which no token belongs (gpt-oss)."""


@dataclass(frozen=True)
class Indexer:
    """Tensors of the indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1)."""

    q: TensorSpec
    """Projection of the low-rank queries of latent attention to the queries of all heads."""
    k: TensorSpec
    """Projection of hidden states to keys."""
    k_norm: tuple[TensorSpec, TensorSpec]
    """Weight and bias of the layer normalization of keys."""
    head_weights: TensorSpec
    """Projection of hidden states to the weight of each head."""


@dataclass(frozen=True)
class LatentAttention:
    """Tensors of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    q: TensorSpec
    """Query projection, from the low rank up where there is `q_down`."""
    q_down: TensorSpec | None
    """Down projection of the queries; None where they are projected directly."""
    q_norm: TensorSpec | None
    """Norm of the low-rank queries."""
    kv_down: TensorSpec
    """Down projection of keys and values."""
    kv_norm: TensorSpec
    """Norm of the low-rank keys and values."""
    kv_up: TensorSpec
    """Up projection of keys and values."""
    out: TensorSpec
    """Output projection."""
    indexer: Indexer | None = None
    """Indexer of sparse attention."""


@dataclass(frozen=True)
class LinearAttention:
    """Tensors of a gated delta net (arXiv:2412.06464): queries q, keys k, values v, gates z, strengths b, decays a."""

    qkvz: tuple[TensorSpec, ...]
    """Projections to q, k, v and z: one with the rows of each key head together, or that of q, k and v, and of z."""
    ba: tuple[TensorSpec, ...]
    """Projections to b and a: one with the rows of each key head together, or one each."""
    conv: TensorSpec
    """Convolution of q, k and v, a filter for each element."""
    dt_bias: TensorSpec
    """Bias of a."""
    a_log: TensorSpec
    """Logarithm of the rate of decay of each value head."""
    norm: TensorSpec
    """Norm of the output of a value head."""
    out: TensorSpec
    """Output projection."""


@dataclass(frozen=True)
class MLP:
    """Tensors of a gated feed-forward layer."""

    gate_up: tuple[TensorSpec, ...]
    """Gate and up projection; a single one whose rows alternate between the two in gpt-oss."""
    down: TensorSpec
    """Down projection."""
    gate_up_bias: TensorSpec | None = None
    """Bias of a single projection `gate_up`."""
    down_bias: TensorSpec | None = None
    """Bias of the down projection."""


@dataclass(frozen=True)
class Experts:
    """Tensors of a mixture-of-experts layer."""

    count: int
    """Number of routed experts."""
    router: TensorSpec
    """Router weight (experts, hidden)."""
    router_bias: TensorSpec | None
    """Bias that the router adds for the choice of experts alone."""
    each: MLP
    """Tensors of each routed expert."""
    shared: MLP | None
    """Shared experts, fused into one feed-forward layer."""
    logit_bias: TensorSpec | None = None
    """Bias of the router's logits (gpt-oss)."""
    shared_gate: TensorSpec | None = None
    """Projection (1, hidden) to the gate of the shared experts."""


@dataclass(frozen=True)
class LayerSpec:
    """Tensors of one transformer layer."""

    input_norm: TensorSpec
    """Norm before attention."""
    attention: GroupedAttention | LatentAttention | LinearAttention
    """Attention."""
    after_attention_norm: TensorSpec | None
    """Norm behind attention (Gemma 2)."""
    mlp_norm: TensorSpec
    """Norm before the feed-forward layer."""
    mlp: MLP | Experts
    """Feed-forward layer or experts."""
    after_mlp_norm: TensorSpec | None
    """Norm behind the feed-forward layer (Gemma 2)."""

    @property
    def num_experts(self) -> int:
        """Number of routed experts; 0 for a dense layer."""
        return self.mlp.count if isinstance(self.mlp, Experts) else 0


@dataclass(frozen=True)
class MultiTokenSpec:
    """Tensors of a layer of multi-token prediction, without those that it shares with the model."""

    embedding_norm: TensorSpec
    """Norm of the embedding of the next token."""
    hidden_norm: TensorSpec
    """Norm of the hidden state of the model."""
    projection: TensorSpec
    """Projection (hidden, 2 hidden) of both side by side, the embedding first."""
    layer: LayerSpec
    """Transformer layer behind the projection."""
    final_norm: TensorSpec
    """Norm before the output layer."""


@dataclass(frozen=True)
class ModelSpec:
    """Tensors of a decoder model."""

    embedding: TensorSpec
    """Input embedding (vocabulary, hidden)."""
    layers: tuple[LayerSpec, ...]
    """Transformer layers in order."""
    final_norm: TensorSpec
    """Norm behind the layers."""
    output: TensorSpec
    """Output layer; the same object as `embedding` where the two are tied."""
    multi_token: MultiTokenSpec | None = None
    """Layer of multi-token prediction, which the checkpoint numbers behind `layers`."""

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """Transformer layers in order, that of multi-token prediction included."""
        return self.layers if self.multi_token is None else (*self.layers, self.multi_token.layer)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Properties of a tensor on which all ranks of a model agree."""

    position: int
    """Position in the order in which tensors are stored and moved."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    float32: bool = False
    """Whether the tensor is float32 in every runtime."""
    dtype: torch.dtype | None = None
    """Dtype in which the tensor travels, where it is not that of the model."""

    def wire_dtype(self, default: torch.dtype) -> torch.dtype:
        """Returns the dtype in which the tensor travels.

        Args:
            default: dtype of the model.
        """
        return torch.float32 if self.float32 else self.dtype or default


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the checkpoint as an instance of a `TensorSpec`."""

    position: int
    """Position in the order of the index."""
    tensor: TensorSpec
    """The specification, with placeholders in its name."""
    layer: int | None = None
    """Index of the layer; None outside the layers."""
    expert: int | None = None
    """Index of the expert in its layer."""
    stacked: bool = False
    """Whether it stacks all experts of its layer."""
    vision: bool = False
    """Whether it belongs to the part of a model that only images pass through."""
    multi_token: bool = False
    """Whether it belongs to the layer of multi-token prediction, which log-probs do not depend on."""

    @property
    def of_experts(self) -> bool:
        """Whether it belongs to routed experts, of which a token passes through a few."""
        return self.expert is not None or self.stacked

    @property
    def is_layer_matrix(self) -> bool:
        """Whether it is a matrix inside the layers: not the embedding, the output layer, a norm or a bias."""
        return self.layer is not None and len(self.tensor.shape) == 2


@dataclass(frozen=True, eq=False)
class TensorIndex:
    """All tensors of a checkpoint by name."""

    entries: Mapping[str, TensorEntry]
    """{name: entry}, in the order in which tensors are stored and moved."""
    tied: bool
    """Whether the output layer is the embedding."""

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """The properties of every tensor on which all ranks agree."""
        return {
            name: TensorInfo(entry.position, entry.tensor.shape, entry.tensor.float32)
            for name, entry in self.entries.items()
        }

    @cached_property
    def stacked(self) -> dict[str, StackedTensor]:
        """Places of the tensors that the files stack, by their own names; empty for most architectures."""
        places, experts = {}, 1 + max((entry.expert or 0 for entry in self.entries.values()), default=0)
        for name, entry in self.entries.items():
            stack, shape = entry.tensor.stack, entry.tensor.shape
            if stack is not None and entry.expert is not None:
                in_files = stack.name.format(layer=entry.layer), stack.shape(experts, shape)
                places[name] = StackedTensor(*in_files, entry.expert, stack.transposed, stack.first_row, shape[0])
        return places

    @cached_property
    def transposed(self) -> frozenset[str]:
        """Names of the tensors that the files stack transposed."""
        return frozenset(name for name, place in self.stacked.items() if place.transposed)


def index_of(model: ModelSpec) -> TensorIndex:
    """Returns the tensors of a model, layer by layer, expert by expert."""
    entries: dict[str, TensorEntry] = {}

    def add(tensor: TensorSpec, layer: int | None = None, expert: int | None = None) -> None:
        name = tensor.name.format(layer=layer, expert=expert)
        multi_token = layer is not None and layer >= len(model.layers)
        entries[name] = TensorEntry(len(entries), tensor, layer, expert, multi_token=multi_token)

    add(model.embedding)
    for number, layer in enumerate(model.all_layers):
        behind = number == len(model.layers)
        tensors = list(tensors_of(model.multi_token if behind else layer))
        for tensor in tensors:
            if not tensor.per_expert:
                add(tensor, number)
        for expert in range(layer.num_experts):
            for tensor in tensors:
                if tensor.per_expert:
                    add(tensor, number, expert)
    add(model.final_norm)
    tied = model.output is model.embedding
    if not tied:
        add(model.output)
    return TensorIndex(entries, tied)


LAYER = "model.layers.{layer}."
"""Prefix of a layer's tensors, where the model is not part of a vision-language model."""
QWEN_MULTI_TOKEN = "mtp."
"""Prefix of the layer of multi-token prediction of Qwen's models with linear attention."""
ATTENTION, LINEAR_ATTENTION, FEED_FORWARD = LAYER + "self_attn.", LAYER + "linear_attn.", LAYER + "mlp."
EXPERT_NAMES = dict.fromkeys(("mixtral", "minimax_m2"), (LAYER + "block_sparse_moe.", "w1", "w3", "w2"))
"""{architecture: (prefix of the experts, names of gate, up and down)} where they differ from other architectures'."""


def model_spec(c: HFConfig) -> ModelSpec:
    """Returns the tensors of a model's checkpoint."""
    embedding = TensorSpec(c.prefix + "embed_tokens.weight", (c.vocab, c.hidden))
    kinds = [(c.has_experts(layer), c.has_linear_attention(layer)) for layer in range(c.layers)]
    prefix = c.prefix + LAYER.removeprefix("model.")
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
    """Returns a part of a layer whose tensors have another prefix."""
    if prefix == other or spec is None or isinstance(spec, int):
        return spec
    if isinstance(spec, tuple):
        return tuple(_renamed(part, prefix, other) for part in spec)
    if isinstance(spec, TensorSpec):
        stack = spec.stack and replace(spec.stack, name=spec.stack.name.replace(prefix, other, 1))
        return replace(spec, name=spec.name.replace(prefix, other, 1), stack=stack)
    return replace(spec, **{field.name: _renamed(getattr(spec, field.name), prefix, other) for field in fields(spec)})


def tensors_of(spec: object) -> Iterator[TensorSpec]:
    """Yields every tensor of a layer or of a part of one, in the order of the fields."""
    if isinstance(spec, TensorSpec):
        yield spec
    elif isinstance(spec, tuple):
        for part in spec:
            yield from tensors_of(part)
    elif spec is not None and not isinstance(spec, int):
        for field in fields(spec):  # type: ignore[arg-type]
            yield from tensors_of(getattr(spec, field.name))


def _layer(c: HFConfig, with_experts: bool, with_linear_attention: bool) -> LayerSpec:
    def norm(name: str) -> TensorSpec:
        return TensorSpec(f"{LAYER}{name}_layernorm.weight", (c.hidden,))

    return LayerSpec(
        input_norm=norm("input"),
        attention=_linear_attention(c.hidden, c.linear) if c.linear and with_linear_attention else _attention(c),
        after_attention_norm=norm("post_attention") if c.sandwich_norms else None,
        mlp_norm=norm("pre_feedforward" if c.sandwich_norms else "post_attention"),
        mlp=_experts(c, c.experts) if with_experts and c.experts else _mlp(FEED_FORWARD, c.hidden, c.ffn),
        after_mlp_norm=norm("post_feedforward") if c.sandwich_norms else None,
    )


def _attention(c: HFConfig) -> GroupedAttention | LatentAttention:
    return _latent_attention(c, c.latent) if c.latent else _grouped_attention(c)


def _grouped_attention(c: HFConfig) -> GroupedAttention:
    width, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
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


def _latent_attention(c: HFConfig, latent: LatentConfig) -> LatentAttention:
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
        indexer=_indexer(c.hidden, latent, c.indexer) if c.indexer else None,
    )


def _indexer(hidden: int, latent: LatentConfig, indexer: IndexerConfig) -> Indexer:
    def tensor(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(f"{ATTENTION}indexer.{name}.weight", shape)

    norm = [TensorSpec(f"{ATTENTION}indexer.k_norm.{x}", (indexer.head_dim,), True) for x in ("weight", "bias")]
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
    """Returns the tensors of gpt-oss's experts; those of the files stack them."""

    def tensor(name: str, *shape: int) -> TensorSpec:
        prefix = FEED_FORWARD + "experts."
        return TensorSpec(prefix + "{expert}." + name, shape, stack=Stack(prefix + name))

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
    bias = TensorSpec(bias_prefix + "e_score_correction_bias", (experts.count,), float32=True)
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


def linear_tensors_of(layer: LayerSpec) -> Iterator[TensorSpec]:
    """Yields the weights of the linear layers outside of routed experts, without routers."""
    attention = layer.attention
    if isinstance(attention, GroupedAttention):
        yield from (attention.q, attention.k, attention.v, attention.out)
    elif isinstance(attention, LinearAttention):
        yield from (*attention.qkvz, *attention.ba, attention.out)
    else:
        if attention.q_down:
            yield attention.q_down
        yield from (attention.q, attention.kv_down, attention.kv_up, attention.out)
    mlp = layer.mlp.shared if isinstance(layer.mlp, Experts) else layer.mlp
    if mlp:
        yield from (*mlp.gate_up, mlp.down)


def expert_tensors_of(layer: LayerSpec) -> Iterator[TensorSpec]:
    """Yields the weights of the linear layers of routed experts; none of those that the files stack transposed."""
    if isinstance(layer.mlp, Experts):
        each = layer.mlp.each
        yield from (t for t in (*each.gate_up, each.down) if t.stack is None or not t.stack.transposed)
