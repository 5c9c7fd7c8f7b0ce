"""FLOPs of a model's forward pass; a backward pass takes twice as many."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_mg.models.hf_config import HFConfig
from verl_mg.models.hf_tensors import TensorIndex


@dataclass(frozen=True)
class RowFlops:
    """FLOPs of the forward pass over a row of L tokens: per_token * L + per_pair * L^2."""

    per_token: float
    """FLOPs in the weight matrices, for each token."""
    per_pair: float
    """FLOPs in attention, for each squared token."""

    def __call__(self, length: int) -> float:
        """Returns the FLOPs of a row of `length` tokens."""
        return length * (self.per_token + self.per_pair * length)


def row_flops(config: HFConfig, tensor_index: TensorIndex) -> RowFlops:
    """Returns the FLOPs of a forward pass over a row, including attention and the output layer.

    A token costs 2 FLOPs for each element of the matrices that it is multiplied with (Narayanan et al.,
    arXiv:2104.04473, appendix); of the experts' elements top_k / count. A head attends to L^2 / 2 pairs of tokens, at
    2 FLOPs for each element of a key and of a value.

    Args:
        config: configuration of the model.
        tensor_index: tensors of the model, with its language-model or value head.
    """
    value_dim = config.latent.v_dim if config.latent else config.head_dim
    per_pair = config.layers * config.heads * (config.head_dim + value_dim)
    return RowFlops(2 * active_elements(config, tensor_index), per_pair)


def active_elements(config: HFConfig, tensor_index: TensorIndex) -> float:
    """Returns the number of weight elements that a token is multiplied with.

    The embedding is a lookup and does not count unless it is the output layer too; of the experts top_k / count do.

    Args:
        config: configuration of the model.
        tensor_index: tensors of the model.
    """
    share = config.experts.top_k / config.experts.count if config.experts else 1.0
    entries = tensor_index.entries.values()
    active = sum(math.prod(e.tensor.shape) * (1.0 if e.expert is None else share) for e in entries)
    return active if tensor_index.tied else active - config.vocab * config.hidden
