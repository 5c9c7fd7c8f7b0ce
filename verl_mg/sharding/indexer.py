"""Parameters of the indexer of sparse attention, which are whole on every rank of every runtime."""

from __future__ import annotations

from verl_mg.models.tensor_tree import Indexer
from verl_mg.sharding.param_spec import ParamSpec


def indexer_params(prefix: str, indexer: Indexer, fused: bool = False) -> tuple[ParamSpec, ...]:
    """Returns the parameters of an indexer; `fused`: keys and weights of heads are one projection."""
    weight, bias = indexer.k_norm
    projections = (
        (ParamSpec(prefix + "wk_weights_proj.weight", (indexer.k, indexer.head_weights)),)
        if fused
        else (
            ParamSpec(prefix + "wk.weight", (indexer.k,)),
            ParamSpec(prefix + "weights_proj.weight", (indexer.head_weights,)),
        )
    )
    return (
        ParamSpec(prefix + "wq_b.weight", (indexer.q,)),
        *projections,
        ParamSpec(prefix + "k_norm.weight", (weight,)),
        ParamSpec(prefix + "k_norm.bias", (bias,)),
    )
