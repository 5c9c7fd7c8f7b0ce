"""Aggregation of per-token losses to the number that is differentiated, for any split of the batch.

Every mode divides by a count over the whole mini-batch. So the plain sum of `aggregate` over micro-batches and data
parallel ranks is its loss: no split, packing or order changes it.

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

from typing import Literal, get_args

import torch
from torch import Tensor

from verl_mg.algorithms.segments import segment_totals
from verl_mg.errors import UserError

LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
MODES: tuple[str, ...] = get_args(LossAggregation)


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
