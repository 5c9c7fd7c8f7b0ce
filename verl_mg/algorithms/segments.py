"""Sums over the entries that share an id, in an order that only the entries decide: no atomics, so repeatable."""

import torch
from torch import Tensor


def segment_sums(values: Tensor, counts: Tensor) -> Tensor:
    """Returns (g,) sums of consecutive segments.

    Args:
        values: (n,) float.
        counts: (g,) int64, lengths of the segments, which add up to n.
    """
    # unsafe: skips the check of the lengths, which raises for a batch without rows.
    return torch.segment_reduce(values, "sum", lengths=counts, unsafe=True)


def segment_totals(values: Tensor, ids: Tensor) -> Tensor:
    """Returns (n,) float64: for each entry the sum of `values` over all entries with its id; differentiable.

    Args:
        values: (n,) float; bool and integers are counted as numbers.
        ids: (n,) int64, neither sorted nor consecutive.
    """
    ids, order = torch.sort(ids, stable=True)
    index = (ids.diff(prepend=ids[:1]) != 0).cumsum(0)  # the entry's segment, numbered from 0
    # One segment per entry, most of them empty: the number of distinct ids would be known to the device only.
    numbers = torch.arange(len(ids), device=ids.device)
    counts = torch.searchsorted(index, numbers, right=True) - torch.searchsorted(index, numbers)
    place = torch.empty_like(order).index_copy_(0, order, index)
    # float64: the sum over a long sequence keeps the digits by which its ratio differs from 1.
    return segment_sums(values[order].double(), counts)[place]


def sequence_sums(values: Tensor, ids: Tensor) -> Tensor:
    """Returns for each token the sum over the tokens of its sequence, computed in float64.

    Args:
        values, ids: (tokens,) float and int64, the sequence of each token.
    """
    return segment_totals(values, ids).to(values.dtype)


def sequence_means(values: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
    """Returns for each token the mean over the masked tokens of its sequence, computed in float64.

    Args:
        values, mask, ids: (tokens,) float, 0 outside the mask; bool; int64, the sequence of each token.
    """
    return (segment_totals(values, ids) / segment_totals(mask, ids).clamp(min=1)).to(values.dtype)
