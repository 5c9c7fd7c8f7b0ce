"""FLOPs of a model's forward pass; a backward pass takes twice as many."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_mg.sharding.weight_table import WeightTable


@dataclass(frozen=True)
class RowFlops:
    """FLOPs of a row of L tokens: per_token * L + per_pair * L^2."""

    per_token: float
    per_pair: float

    def __call__(self, length: int) -> float:
        """Of a row of so many tokens."""
        return length * (self.per_token + self.per_pair * length)


def row_flops(weights: WeightTable) -> RowFlops:
    """Of a forward pass over a row, attention and the output layer included.

    A token costs 2 FLOPs for each element of the matrices that it meets (Narayanan et al., arXiv:2104.04473, appendix),
    experts by top_k of their count. A head attends to L^2 / 2 pairs of tokens, at 2 FLOPs for each element of a key
    and of a value.
    """
    c = weights.config
    value = c.latent.v_dim if c.latent else c.head_dim
    return RowFlops(2 * active_elements(weights), c.layers * c.heads * (c.head_dim + value))


def active_elements(weights: WeightTable) -> float:
    """Elements of the weights that a token is multiplied with: no embedding, of the experts top_k of their count."""
    c = weights.config
    share = c.experts.top_k / c.experts.count if c.experts else 1.0
    entries = weights.tensor_index.entries.values()
    met = sum(math.prod(e.tensor.shape) * (1.0 if e.expert is None else share) for e in entries)
    return met if weights.tied else met - c.vocab * c.hidden
