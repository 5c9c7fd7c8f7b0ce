"""Tensors of a model's checkpoint as a tree of layers.

    ModelSpec
      embedding               model.embed_tokens.weight
      layers: LayerSpec       attention: GroupedAttention, LatentAttention or LinearAttention
                              mlp: MLP or Experts, whose `each` has {expert} in its names
      final_norm, output      model.norm.weight, lm_head.weight; a tied output is the embedding
      multi_token             None, or a further layer

The tables of Megatron, SGLang and `transformers` refer to the fields of this tree, never to names. A name with
`{layer}` exists once for each layer, one with `{expert}` once for each expert of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from verl_mg.dtypes import is_integer

# Everywhere else each expert has separate tensors, matrices as (out, in), as with other architectures: expert
# parallelism, resharding and the tables of engines need no second way.
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensor of the files that stacks tensors of all experts."""

    name: str  # name of the tensor, with `{layer}` as placeholder
    transposed: bool = True  # whether it has the experts' tensors transposed
    first_row: int = 0  # row at which the expert's tensor begins, of a tensor that is not transposed
    rows: int = 0  # rows of an expert in it, of a tensor that is not transposed

    def shape(self, experts: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the tensor for the number of experts and the shape of an expert's tensor."""
        return (experts, *reversed(shape)) if self.transposed else (experts, self.rows, *shape[1:])


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """Place of an expert's tensor in a tensor of the files that stacks the tensors of all experts."""

    name: str
    shape: tuple[int, ...]
    """Shape of the stacked tensor; transposed (experts, columns, rows), or (experts, rows) of biases."""
    index: int
    transposed: bool = True  # whether the stack has the experts' tensors transposed
    first_row: int = 0  # row of the stack at which the expert's tensor begins, where it is not transposed
    rows: int = 0  # rows of the expert's tensor, where it is not transposed

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """Shape of the expert's tensor."""
        return self.shape[:0:-1] if self.transposed else (self.rows, *self.shape[2:])

    def box(self, box: Ranges) -> Ranges:
        """Returns the box of the stacked tensor that has the elements of a box of the expert's tensor."""
        expert = (self.index, self.index + 1)
        if self.transposed:
            return (expert, *reversed(box))
        (start, stop), *others = box
        return (expert, (start + self.first_row, stop + self.first_row), *others)


def expert_shapes(
    shapes: Mapping[str, tuple[int, ...]], stacked: Mapping[str, StackedTensor]
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a checkpoint with the experts' tensors, in order, in place of each stacked one."""
    members: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, place in stacked.items():
        members.setdefault(place.name, {})[name] = place.expert_shape
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        result |= members.get(name, {name: shape})
    return result


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the checkpoint, or of each layer or expert."""

    name: str  # Hugging Face name, with `{layer}` and `{expert}` as placeholders
    shape: tuple[int, ...]
    dtype: str | None = None  # name of the dtype of the tensor in every runtime; None: the dtype of the model
    stack: Stack | None = None
    """Tensor in files that stacks it for all experts, see `StackedTensor`; None: a separate tensor."""

    @property
    def is_integer(self) -> bool:
        """Whether its elements are integers or truth values, such as a table of experts by token."""
        return self.dtype is not None and is_integer(self.dtype)

    @property
    def per_expert(self) -> bool:
        """Whether each expert of a layer has such a tensor."""
        return "{expert}" in self.name


@dataclass(frozen=True)
class GroupedAttention:
    """Tensors of grouped-query attention."""

    q: TensorSpec  # query projection; with an output gate the rows of each head's query, then of its gate
    k: TensorSpec
    v: TensorSpec
    out: TensorSpec
    biases: tuple[TensorSpec, ...]  # biases of q, k and v; empty without
    norms: tuple[TensorSpec, ...]  # norms of q and k; empty without
    out_bias: TensorSpec | None = None  # bias of the output projection
    sinks: TensorSpec | None = None  # score of each query head to which no token belongs (gpt-oss)


@dataclass(frozen=True)
class Indexer:
    """Tensors of the indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1)."""

    q: TensorSpec  # projection of the low-rank queries of latent attention to the queries of all heads
    k: TensorSpec  # projection of hidden states to keys
    k_norm: tuple[TensorSpec, TensorSpec]  # weight and bias of the layer normalization of keys
    head_weights: TensorSpec  # projection of hidden states to the weight of each head


@dataclass(frozen=True)
class LatentAttention:
    """Tensors of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    q: TensorSpec  # query projection, from the low rank up where there is `q_down`
    q_down: TensorSpec | None  # down projection of the queries; None where they are projected directly
    q_norm: TensorSpec | None  # norm of the low-rank queries
    kv_down: TensorSpec  # down projection of keys and values
    kv_norm: TensorSpec  # norm of the low-rank keys and values
    kv_up: TensorSpec  # up projection of keys and values
    out: TensorSpec
    indexer: Indexer | None = None


@dataclass(frozen=True)
class LinearAttention:
    """Tensors of a gated delta net (arXiv:2412.06464): queries q, keys k, values v, gates z, strengths b, decays a."""

    qkvz: tuple[TensorSpec, ...]
    """Projections to q, k, v and z: one with the rows of each key head together, or one to q, k and v and one to z."""
    ba: tuple[TensorSpec, ...]  # projections to b and a: one with the rows of each key head together, or one each
    conv: TensorSpec  # convolution of q, k and v, a filter for each element
    dt_bias: TensorSpec  # bias of a
    a_log: TensorSpec  # logarithm of the rate of decay of each value head
    norm: TensorSpec  # norm of the output of a value head
    out: TensorSpec


@dataclass(frozen=True)
class MLP:
    """Tensors of a gated feed-forward layer."""

    gate_up: tuple[TensorSpec, ...]
    """Gate and up projection; a single one whose rows alternate between the two in gpt-oss."""
    down: TensorSpec
    gate_up_bias: TensorSpec | None = None  # bias of a single projection `gate_up`
    down_bias: TensorSpec | None = None  # bias of the down projection


@dataclass(frozen=True)
class Experts:
    """Tensors of a mixture-of-experts layer."""

    count: int
    router: TensorSpec  # router weight (experts, hidden)
    router_bias: TensorSpec | None  # bias that the router adds only for the choice of experts
    each: MLP
    shared: MLP | None  # shared experts, fused into one feed-forward layer
    logit_bias: TensorSpec | None = None  # bias of the router's logits (gpt-oss)
    shared_gate: TensorSpec | None = None  # projection (1, hidden) to the gate of the shared experts


@dataclass(frozen=True)
class LayerSpec:
    """Tensors of one transformer layer."""

    input_norm: TensorSpec
    attention: GroupedAttention | LatentAttention | LinearAttention
    after_attention_norm: TensorSpec | None  # norm after attention (Gemma 2)
    mlp_norm: TensorSpec  # norm before the feed-forward layer
    mlp: MLP | Experts
    after_mlp_norm: TensorSpec | None  # norm after the feed-forward layer (Gemma 2)

    @property
    def num_experts(self) -> int:
        """Number of routed experts; 0 for a dense layer."""
        return self.mlp.count if isinstance(self.mlp, Experts) else 0


@dataclass(frozen=True)
class MultiTokenSpec:
    """Tensors of a layer of multi-token prediction, without the ones that it shares with the model."""

    embedding_norm: TensorSpec  # norm of the embedding of the next token
    hidden_norm: TensorSpec  # norm of the hidden state of the model
    projection: TensorSpec  # projection (hidden, 2 hidden) of both side by side, the embedding first
    layer: LayerSpec  # transformer layer after the projection
    final_norm: TensorSpec  # norm before the output layer


@dataclass(frozen=True)
class ModelSpec:
    """Tensors of a decoder model."""

    embedding: TensorSpec  # input embedding (vocabulary, hidden)
    layers: tuple[LayerSpec, ...]
    final_norm: TensorSpec
    output: TensorSpec  # output layer; the same object as `embedding` where the two are tied
    multi_token: MultiTokenSpec | None = None
    """Layer of multi-token prediction, which the checkpoint numbers after `layers`."""

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """Transformer layers in order, the one of multi-token prediction included."""
        return self.layers if self.multi_token is None else (*self.layers, self.multi_token.layer)


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
    """Yields the weights of the linear layers of routed experts; none that the files stack transposed."""
    if isinstance(layer.mlp, Experts):
        each = layer.mlp.each
        yield from (t for t in (*each.gate_up, each.down) if t.stack is None or not t.stack.transposed)
