"""What a model is made of, in the names of its Hugging Face checkpoint: blocks of named tensors.

The dialects of Megatron, SGLang and `transformers` are written over these blocks and never over names.
Names with `{layer}` stand once in every layer, with `{expert}` once in every expert of one.
Source of names and shapes: the checkpoints' own modules in `transformers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from verl_mg.models.hf_config import ExpertsConfig, HFConfig, LatentConfig


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the checkpoint: its name, global shape, and whether it stays float32 in every dialect."""

    name: str
    shape: tuple[int, ...]
    float32: bool = False

    @property
    def per_expert(self) -> bool:
        """Whether each expert of a layer has one."""
        return "{expert}" in self.name


@dataclass(frozen=True)
class GroupedAttention:
    """Grouped-query attention; `biases` and `norms` are of q, k, v and of q, k, or empty."""

    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    out: TensorSpec
    biases: tuple[TensorSpec, ...]
    norms: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention. `q` alone, or `q_down`, `q_norm` and `q` from the low rank up."""

    q: TensorSpec
    q_down: TensorSpec | None
    q_norm: TensorSpec | None
    kv_down: TensorSpec
    kv_norm: TensorSpec
    kv_up: TensorSpec
    out: TensorSpec


@dataclass(frozen=True)
class MLP:
    """A gated feed-forward layer."""

    gate: TensorSpec
    up: TensorSpec
    down: TensorSpec


@dataclass(frozen=True)
class Experts:
    """A mixture of `count` experts, each with the tensors `each`."""

    count: int
    router: TensorSpec
    router_bias: TensorSpec | None
    each: MLP
    shared: MLP | None


@dataclass(frozen=True)
class LayerSpec:
    """One transformer layer; the norms after attention and feed-forward are Gemma 2's."""

    input_norm: TensorSpec
    attention: GroupedAttention | LatentAttention
    after_attention_norm: TensorSpec | None
    mlp_norm: TensorSpec
    mlp: MLP | Experts
    after_mlp_norm: TensorSpec | None

    @property
    def experts(self) -> int:
        """How many experts it has."""
        return self.mlp.count if isinstance(self.mlp, Experts) else 0


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: embedding, its layers in order, final norm, output; `output` is the embedding where tied."""

    embedding: TensorSpec
    blocks: tuple[LayerSpec, ...]
    final_norm: TensorSpec
    output: TensorSpec


ATTENTION, FEED_FORWARD = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
# Mixtral calls its mixture, and gate, down and up, by names of its own.
MIXTURE_NAMES = {"mixtral": ("model.layers.{layer}.block_sparse_moe.", "w1", "w3", "w2")}


def model_spec(c: HFConfig) -> ModelSpec:
    """The tensors of a model's checkpoint."""
    embedding = TensorSpec("model.embed_tokens.weight", (c.vocab, c.hidden))
    kinds = {with_experts: _block(c, with_experts) for with_experts in (False, True) if with_experts <= bool(c.experts)}
    return ModelSpec(
        embedding,
        tuple(kinds[c.has_experts(layer)] for layer in range(c.layers)),
        TensorSpec("model.norm.weight", (c.hidden,)),
        embedding if c.tied else TensorSpec("lm_head.weight", (c.vocab, c.hidden)),
    )


def tensors_of(block: object) -> Iterator[TensorSpec]:
    """Every tensor of a block, in the order of its fields."""
    if isinstance(block, TensorSpec):
        yield block
    elif isinstance(block, tuple):
        for part in block:
            yield from tensors_of(part)
    elif block is not None and not isinstance(block, int):
        for field in fields(block):  # type: ignore[arg-type]
            yield from tensors_of(getattr(block, field.name))


def _block(c: HFConfig, with_experts: bool) -> LayerSpec:
    def norm(name: str) -> TensorSpec:
        return TensorSpec("model.layers.{layer}." + name + "_layernorm.weight", (c.hidden,))

    return LayerSpec(
        input_norm=norm("input"),
        attention=_latent_attention(c, c.latent) if c.latent else _grouped_attention(c),
        after_attention_norm=norm("post_attention") if c.sandwich_norms else None,
        mlp_norm=norm("pre_feedforward" if c.sandwich_norms else "post_attention"),
        mlp=_experts(c, c.experts) if with_experts and c.experts else _mlp(FEED_FORWARD, c.hidden, c.ffn),
        after_mlp_norm=norm("post_feedforward") if c.sandwich_norms else None,
    )


def _grouped_attention(c: HFConfig) -> GroupedAttention:
    rows = {"q": c.heads * c.head_dim, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim}
    q, k, v = (TensorSpec(f"{ATTENTION}{x}_proj.weight", (n, c.hidden)) for x, n in rows.items())
    biases = tuple(TensorSpec(f"{ATTENTION}{x}_proj.bias", (n,)) for x, n in rows.items())
    norms = tuple(TensorSpec(f"{ATTENTION}{x}_norm.weight", (c.head_dim,)) for x in "qk")
    out = TensorSpec(ATTENTION + "o_proj.weight", (c.hidden, rows["q"]))
    return GroupedAttention(q, k, v, out, biases if c.qkv_bias else (), norms if c.qk_norm else ())


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
    )


def _mlp(
    prefix: str, hidden: int, ffn: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> MLP:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return MLP(TensorSpec(gate, (ffn, hidden)), TensorSpec(up, (ffn, hidden)), TensorSpec(down, (hidden, ffn)))


def _experts(c: HFConfig, experts: ExpertsConfig) -> Experts:
    prefix, *names = MIXTURE_NAMES.get(c.architecture, (FEED_FORWARD, "gate_proj", "up_proj", "down_proj"))
    bias = TensorSpec(prefix + "gate.e_score_correction_bias", (experts.count,), float32=True)
    gate, up, down = names
    return Experts(
        count=experts.count,
        router=TensorSpec(prefix + "gate.weight", (experts.count, c.hidden)),
        router_bias=bias if experts.router_bias else None,
        each=_mlp(prefix + "experts.{expert}.", c.hidden, experts.ffn, (gate, up, down)),
        shared=_mlp(prefix + "shared_experts.", c.hidden, experts.shared_ffn) if experts.shared_ffn else None,
    )
