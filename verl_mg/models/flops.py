"""FLOPs of a model's forward pass, of a whole row and of the parts of a layer.

A backward pass takes twice as many for matrix products, and 2.5 times as many for attention with a fused kernel,
which computes the scores again (Dao, arXiv:2307.08691, section 4.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_mg.models.hf_config import HFConfig
from verl_mg.models.tensor_index import TensorIndex


@dataclass(frozen=True)
class RowFlops:
    """FLOPs of the forward pass over a row of L tokens: per_token * L + per_pair * L^2.

    Where another row computes its first S tokens: per_token * (L - S) + per_pair * (L^2 - S^2). With 10 and 1: a row
    of 4 tokens takes 56, and 45 where another row computes its first one.
    """

    per_token: float  # FLOPs in the weight matrices, for each token
    per_pair: float  # FLOPs in attention, for each squared token

    def __call__(self, length: int, shared: int = 0) -> float:
        """Returns the FLOPs of a row, of whose tokens another row computes the first `shared`."""
        return (length - shared) * (self.per_token + self.per_pair * (length + shared))


def row_flops(config: HFConfig, tensor_index: TensorIndex) -> RowFlops:
    """Returns the FLOPs of a forward pass over a row, including attention and the output layer."""
    # A token costs 2 FLOPs for each element of the matrices that it is multiplied with (Narayanan et al.,
    # arXiv:2104.04473, appendix). A head attends to L^2 / 2 pairs of tokens, at 2 FLOPs for each element of a key and
    # of a value.
    linear = len(config.linear.layers) if config.linear else 0
    per_token = 2 * active_elements(config, tensor_index) + linear * state_flops(config)
    return RowFlops(per_token, (config.layers - linear) * pair_flops(config))


def active_elements(config: HFConfig, tensor_index: TensorIndex) -> float:
    """Returns the number of weight elements that a token is multiplied with."""
    # On average over tokens: which experts a token has is not known on paper.
    share = config.experts.top_k / config.experts.count if config.experts else 1.0
    entries = [entry for entry in tensor_index.entries.values() if not entry.vision and not entry.multi_token]
    active = sum(math.prod(e.tensor.shape) * (share if e.of_experts else 1.0) for e in entries)
    # The embedding is a lookup and does not count unless it is the output layer too.
    return active if tensor_index.tied else active - config.vocab * config.hidden


@dataclass(frozen=True)
class LayerElements:
    """Number of weight elements that one token is multiplied with in one layer, without norms."""

    attention: int  # projections of attention, `mla_up` included; of linear attention the convolution too
    mla_up: int  # projections of latent attention from the compressed states to the heads
    mlp: int
    experts: int  # routed experts of the token
    shared: int
    router: int

    @property
    def all(self) -> int:
        """Number of elements of all parts."""
        return self.attention + self.mlp + self.experts + self.shared + self.router


def layer_elements(config: HFConfig, with_experts: bool, linear: bool = False) -> LayerElements:
    """Counts the weight elements that one token is multiplied with in one layer."""
    attention, mla_up = (_linear_elements(config), 0) if linear else _attention_elements(config)
    if not with_experts:
        return LayerElements(attention, mla_up, 3 * config.hidden * config.ffn, 0, 0, 0)
    assert config.experts is not None
    e = config.experts
    routed, shared = 3 * config.hidden * e.ffn * e.top_k, (3 * e.shared_ffn + e.shared_gate) * config.hidden
    return LayerElements(attention, mla_up, 0, routed, shared, config.hidden * e.count)


def _attention_elements(config: HFConfig) -> tuple[int, int]:
    """Returns the elements of all projections of attention, and of projections from compressed states to heads."""
    latent = config.latent
    if latent is None:
        heads = config.heads * (2 + config.output_gate) + 2 * config.kv_heads
        return config.hidden * config.head_dim * heads, 0
    key = latent.qk_nope_head_dim + latent.rope_dim
    up = config.heads * latent.kv_rank * (latent.qk_nope_head_dim + latent.v_dim)
    if latent.q_rank:
        up += config.heads * latent.q_rank * key
    down = config.hidden * (latent.kv_rank + latent.rope_dim)
    down += config.hidden * (latent.q_rank or config.heads * key)
    if config.indexer:
        index = config.indexer
        elements = index.heads * index.head_dim * latent.q_rank + config.hidden * (index.head_dim + index.heads)
        down += elements * len(set(index.sources)) // config.layers  # on average: some layers share a selection
    return up + down + config.heads * latent.v_dim * config.hidden, up


def _linear_elements(config: HFConfig) -> int:
    """Returns the elements of the projections and of the convolution of linear attention."""
    assert config.linear
    c = config.linear
    rows = c.convolved_width + 2 * c.value_width + 2 * c.value_heads
    return config.hidden * rows + c.kernel * c.convolved_width


def state_flops(config: HFConfig) -> float:
    """Returns the FLOPs of one layer's linear attention for each token: products of three vectors with the states."""
    return 6.0 * config.linear.key_dim * config.linear.value_width if config.linear else 0.0


def pair_flops(config: HFConfig) -> float:
    """Returns the FLOPs of one layer's softmax attention for each squared token of a row, all heads together."""
    # Sparse attention is computed to all keys, with a mask. The scores of its indexer, which rows of up to `top_k`
    # tokens do not need, are left out.
    value_dim = config.latent.v_dim if config.latent else config.head_dim
    return config.heads * (config.head_dim + value_dim)


def key_share(config: HFConfig) -> float:
    """Returns the memory of one token's keys and values as a share of all its activations in a layer."""
    # The activations of a token are about 17 elements for each element of its hidden state (Korthikanti et al.,
    # arXiv:2205.05198, section 4.1, without attention scores).
    value_dim = config.latent.v_dim if config.latent else config.head_dim
    heads = config.heads if config.latent else config.kv_heads
    return min(1.0, heads * (config.head_dim + value_dim) / (17 * config.hidden))


# Iterations of Muon's orthogonalization (arXiv:2502.16982, section 2), and megatron-core's default.
NEWTON_SCHULZ_STEPS = 5


def orthogonalization_flops(tensor_index: TensorIndex) -> float:
    """Returns the FLOPs of Muon's orthogonalization of all matrices of layers in one optimizer step."""
    # An iteration on an (m, n) matrix X, m <= n, computes X X^T, the square of that, and its product with X.
    matrices = [sorted(e.tensor.shape) for e in tensor_index.entries.values() if e.is_layer_matrix]
    return float(sum(NEWTON_SCHULZ_STEPS * (4 * m * m * n + 2 * m**3) for m, n in matrices))
