"""Rules for linear attention, a gated delta net (arXiv:2412.06464), and the indexer of sparse attention.

Which rows has a rank with some of the key heads? q, k, v and z are queries, keys, values and gates, b and a one number
for each value head. Rows of the checkpoint, with two key heads that have two value heads each:

    by key head (Qwen3-Next)    in_proj_qkvz: q0 k0 v0 v1 z0 z1 q1 k1 v2 v3 z2 z3    in_proj_ba: b0 b1 a0 a1 b2 b3 a2 a3
    otherwise (Qwen3.5)         in_proj_qkv: q0 q1 k0 k1 v0 v1 v2 v3   in_proj_z: z0 .. z3   in_proj_b, in_proj_a

Parameters of fused projections are sorted by these letters.
"""

from __future__ import annotations

from verl_mg.models.attention_config import LinearConfig
from verl_mg.models.tensor_tree import Indexer
from verl_mg.sharding.param_spec import ParamRow, Section, SectionRows


def inputs(linear: LinearConfig) -> SectionRows:
    """Returns the rule of one parameter of all projections: q, k, v, z, b, a."""
    # b and a follow one tensor, in_proj_qkvz, or two, in_proj_qkv and in_proj_z.
    return SectionRows(linear.key_heads, (*_qkvz(linear), *_ba(linear, 1 if linear.by_key_head else 2)))


def qkvz(linear: LinearConfig) -> SectionRows:
    """Returns the rule of one parameter of q, k, v and z."""
    return SectionRows(linear.key_heads, _qkvz(linear))


def ba(linear: LinearConfig) -> SectionRows:
    """Returns the rule of one parameter of b and a."""
    return SectionRows(linear.key_heads, _ba(linear, 0))


def convolved(linear: LinearConfig) -> SectionRows:
    """Returns the rule of the convolution of q, k and v, whose rows are in the order q, k, v in every checkpoint."""
    return SectionRows(linear.key_heads, _qkv(linear))


def _qkv(linear: LinearConfig) -> tuple[Section, ...]:
    key, value, width = linear.key_dim, linear.group * linear.value_dim, linear.key_width
    return Section(0, 0, key, key), Section(0, width, key, key), Section(0, 2 * width, value, value)


def _qkvz(linear: LinearConfig) -> tuple[Section, ...]:
    key, value = linear.key_dim, linear.group * linear.value_dim
    if not linear.by_key_head:
        return *_qkv(linear), Section(1, 0, value, value)
    return _in_turns(0, key, key, value, value)


def _ba(linear: LinearConfig, first: int) -> tuple[Section, ...]:
    heads = linear.group
    if linear.by_key_head:
        return _in_turns(first, heads, heads)
    return Section(first, 0, heads, heads), Section(first + 1, 0, heads, heads)


def _in_turns(tensor: int, *rows: int) -> tuple[Section, ...]:
    """Returns the sections of a tensor with a slab of each of `rows`, unit by unit."""
    return tuple(Section(tensor, sum(rows[:number]), height, sum(rows)) for number, height in enumerate(rows))


def indexer_params(prefix: str, indexer: Indexer, fused: bool = False) -> tuple[ParamRow, ...]:
    """Returns the parameters of an indexer, whole on every rank; `fused`: keys and weights of heads are one."""
    weight, bias = indexer.k_norm
    joint = {"wk_weights_proj.weight": (indexer.k, indexer.head_weights)}
    apart = {"wk.weight": (indexer.k,), "weights_proj.weight": (indexer.head_weights,)}
    norms = {"k_norm.weight": (weight,), "k_norm.bias": (bias,)}
    rows = {"wq_b.weight": (indexer.q,), **(joint if fused else apart), **norms}
    return tuple(ParamRow(prefix + name, tensors) for name, tensors in rows.items())
