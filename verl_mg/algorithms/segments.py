"""Sums over the entries that share an id, in an order that the entries alone decide: no atomics, so no noise."""

import torch
from torch import Tensor


def segment_sums(values: Tensor, counts: Tensor) -> Tensor:
    """Sums (g,) of consecutive runs of `values` (n,), the i-th of them `counts[i]` long."""
    # unsafe: skips the check of the lengths, which stumbles over a batch without rows.
    return torch.segment_reduce(values, "sum", lengths=counts, unsafe=True)


def totals(values: Tensor, ids: Tensor) -> Tensor:
    """For each entry the sum of `values` over all entries with its id; differentiable.

    Args:
        values: (n,) float; bool and integers are counted as numbers.
        ids: (n,) int64, neither sorted nor consecutive.

    Returns:
        (n,) float64: the sum over a long sequence keeps the digits that its ratio to 1 is about.
    """
    order = torch.argsort(ids, stable=True)
    _, index, counts = torch.unique_consecutive(ids[order], return_inverse=True, return_counts=True)
    place = torch.empty_like(order).index_copy_(0, order, index)
    return segment_sums(values[order].double(), counts)[place]
