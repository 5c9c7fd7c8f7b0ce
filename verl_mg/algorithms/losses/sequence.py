"""Policy losses with one ratio for a whole sequence.

In the formulas n is the number of masked tokens of a sequence, d the log-ratio logprobs - old_logprobs of a token,
and A its advantage. Columns and metrics are as in `losses.policy`, with `sequence_ids` (tokens,) int64 equal for tokens
of one sequence, all of which are in the micro-batch. Log-ratios [0.2, 0.4] of one sequence: s = exp(0.3) = 1.35.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from verl_mg.algorithms import kl
from verl_mg.algorithms.aggregation import sequence_means
from verl_mg.algorithms.losses.policy import Metrics, check_clips, clip_metrics, masked, masked_constant, ratio_metrics
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) clipped surrogate of s = exp(sum of d / n): GSPO-token, arXiv:2507.18071, equation 14.

    max(-A s, -A clip(s, 1 - low, 1 + high)). s has the value of equation 7 and, for each token, the gradient of only
    that token's log-prob; with equal advantages in a sequence and "seq-mean-token-mean" value and gradient are
    GSPO's, equation 5. The paper clips at 3e-4 and 4e-4. The metric `ratio` is s.

    Args:
        logprobs, old_logprobs, advantages, mask, sequence_ids: see the module.
        clip_low, clip_high, dual_clip: as in `clipped_policy_loss`, of s.
    """
    check_clips(clip_low, clip_high, dual_clip)
    advantages, logprobs = masked_constant(mask, advantages), masked(mask, logprobs)
    difference = logprobs.detach() - masked_constant(mask, old_logprobs)
    # A sequence is a row: segments of a trajectory are separate contexts, perhaps in different micro-batches. Until the
    # first update all ratios are 1, and a trajectory in segments has the loss and gradient of one in a single row;
    # later its clipping is finer. The aggregation weighs a segment by its share of the tokens of its trajectory.
    log_ratio = sequence_means(difference, mask, sequence_ids)
    # Plus 0: the value stays s, the gradient is that of the token's log-prob.
    ratio = torch.exp(kl.bounded(log_ratio + (logprobs - logprobs.detach())))
    low, high = 1 - clip_low, 1 + clip_high
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return loss, clip_metrics(ratio, advantages, mask, low, high) | ratio_metrics(ratio, mask, difference)


def gmpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) -A times the geometric mean of the clipped token ratios of a sequence: GMPO, arXiv:2507.20673.

    The clip is of the logarithm, where it removes the gradient: d is at most `clip_high` if A > 0 and at least
    -`clip_low` if A < 0 (0.4 both in the paper), and there at most log c with a `dual_clip` c above 1. Every token
    of a sequence carries the value of its sequence, which depends on all of its log-probs; so "seq-mean-token-mean"
    gives the objective of the paper, in value and gradient, and "token-mean" weighs the sequences by their length. A is
    the mean advantage of the sequence. The metric `ratio` is the token's, not clipped.

    Args:
        logprobs, old_logprobs, advantages, mask, sequence_ids: see the module.
        clip_low, clip_high: distances of the bounds of d from 0, nats.
        dual_clip: c, or None for no bound.
    """
    check_clips(clip_low, clip_high, dual_clip)
    difference = masked(mask, logprobs) - masked_constant(mask, old_logprobs)
    advantages = masked_constant(mask, sequence_means(masked_constant(mask, advantages), mask, sequence_ids))
    highest = math.inf if dual_clip is None else math.log(dual_clip)
    clipped = torch.where(advantages > 0, difference.clamp(max=clip_high), difference.clamp(-clip_low, highest))
    loss = masked(mask, -advantages * torch.exp(kl.bounded(sequence_means(clipped, mask, sequence_ids))))
    metrics = clip_metrics(difference, advantages, mask, -clip_low, clip_high)
    return loss, metrics | ratio_metrics(torch.exp(kl.bounded(difference)), mask, difference)
