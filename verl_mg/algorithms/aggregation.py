"""Sums over the entries that share an id, and aggregation of per-token losses to the number that is differentiated.

Sums of segments are in an order that only the entries decide: no atomics, so repeatable.

Every mode of aggregation divides by a count over the whole mini-batch. So the plain sum of `aggregate` over
micro-batches and data parallel ranks is its loss: no split, packing or order changes it.

    mode                       loss of the mini-batch                             normalizer
    "token-mean"               sum over tokens / normalizer                       tokens
    "seq-mean-token-sum"       sum over sequences of token sums / normalizer      sequences
    "seq-mean-token-mean"      sum over sequences of token means / normalizer     sequences
    "seq-mean-token-sum-norm"  sum over tokens / normalizer                       sequences * max_length

"token-mean" is DAPO's (arXiv:2503.14476, section 3.3), "seq-mean-token-mean" GRPO's (arXiv:2402.03300,
equation 3), "seq-mean-token-sum-norm" Dr. GRPO's (arXiv:2503.20783, section 3.2). Losses of tokens [1 3] and [2]
give 2, 3, 2 and, with max_length 4, 0.75.

Only tokens in the mask count, and sequences with at least one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
MODES: tuple[str, ...] = get_args(LossAggregation)


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


def aggregate(
    loss: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    mode: str,
    normalizer: float,
    sequence_tokens: Tensor | None = None,
) -> Tensor:
    """Returns () this micro-batch's part of the loss of the mini-batch; 0, attached to `loss`, when the mask is empty.

    Args:
        loss: (tokens,) float; values outside the mask reach neither value nor gradient.
        mask: (tokens,) bool.
        sequence_ids: (tokens,) int64, index from 0 of a token's sequence in this micro-batch.
        mode: one of MODES; UserError for any other.
        normalizer: result of the function `normalizer`, the same on all ranks.
        sequence_tokens: (tokens,) masked tokens of the token's trajectory, here and elsewhere; None: all are here.
    """
    _check(mode)
    # A selection by the mask would have a size that the host must wait for.
    kept = torch.where(mask, loss, 0.0)
    if mode == "seq-mean-token-mean":
        # All rows of a trajectory are one sequence: an agent's sample counts as much as any other. They may be in
        # several micro-batches, so each token brings along the number of tokens of its trajectory.
        counts = segment_totals(mask, sequence_ids) if sequence_tokens is None else sequence_tokens
        kept = kept / counts.clamp(min=1).to(kept.dtype)
    return kept.sum() / normalizer


def normalizer(mode: str, tokens: int, sequences: int, max_length: int | None) -> float:
    """Returns the number by which `mode` divides, the same for all parts of a mini-batch; 1 without masked tokens.

    Args:
        mode: one of MODES; UserError for any other.
        tokens: masked tokens of the mini-batch.
        sequences: trajectories of the mini-batch with at least one masked token.
        max_length: constant response length in tokens; only for "seq-mean-token-sum-norm".
    """
    _check(mode)
    if mode == "token-mean":
        return float(max(tokens, 1))
    if mode != "seq-mean-token-sum-norm":
        return float(max(sequences, 1))
    if max_length is None or max_length < 1:
        raise UserError(f"aggregation {mode!r}: max_length is {max_length}. Pass the longest response, in tokens")
    return float(max(sequences, 1) * max_length)


def _check(mode: str) -> None:
    if mode not in MODES:
        raise UserError(f"aggregation {mode!r} is unknown. Write one of {', '.join(MODES)}")
