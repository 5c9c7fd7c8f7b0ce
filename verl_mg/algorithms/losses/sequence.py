"""Policy losses whose ratio is that of a whole sequence.

In the formulas n is the number of masked tokens of a sequence, d the log-ratio logprobs - old_logprobs of a token, and
A its advantage.

A sequence is a row: of an agent's trajectory each segment has a ratio, that of the tokens which it trains. Segments are
contexts of their own, and need not be in the same micro-batch. As long as the policy has not been updated, all ratios
are 1, and a trajectory in segments has the loss and gradient of one in a single row; later its clipping is finer. The
aggregation by sequences weighs a segment by its share of the tokens of its trajectory.
"""

import math

import torch
from torch import Tensor

from verl_mg.algorithms.losses.columns import (
    Metrics,
    check_clips,
    clip_metrics,
    masked,
    masked_constant,
    ratio_metrics,
)
from verl_mg.algorithms.segments import sequence_means


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
    """Returns the clipped surrogate of the ratio s = exp(sum of d / n): GSPO-token, arXiv:2507.18071, equation 14.

    max(-A s, -A clip(s, 1 - low, 1 + high)). s has the value of equation 7 and, for each token, the gradient of
    that token's log-prob alone; with equal advantages in a sequence and "seq-mean-token-mean" value and gradient are
    GSPO's, equation 5. The paper clips at 3e-4 and 4e-4. `dual_clip`, a number c above 1, bounds the loss by -A c where
    A < 0, as in `clipped_policy_loss`.

    Args:
        logprobs: (tokens,) nats, of the policy in training; only they have a gradient.
        old_logprobs: (tokens,) nats, of the policy at the start of the iteration.
        advantages: (tokens,) float.
        mask: (tokens,) bool, true on tokens that count.
        sequence_ids: (tokens,) int64, equal for tokens of one sequence, all of which are in the micro-batch.
        clip_low: distance of the lower bound of s from 1.
        clip_high: distance of the upper bound of s from 1.
        dual_clip: c, or None for no bound.

    Returns:
        (tokens,) loss, and the metrics `ratio` (s), `clip_fraction_low`, `clip_fraction_high` (1 where the clip
        removes the gradient at that end) and `approx_kl` (k3 estimate of KL(old || new) by token, nats).
    """
    check_clips(clip_low, clip_high, dual_clip)
    advantages, logprobs = masked_constant(mask, advantages), masked(mask, logprobs)
    difference = logprobs.detach() - masked_constant(mask, old_logprobs)
    sequence_ratio = torch.exp(sequence_means(difference, mask, sequence_ids))
    ratio = sequence_ratio * torch.exp(logprobs - logprobs.detach())
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
    """Returns -A times the geometric mean of the clipped token ratios of a sequence: GMPO, arXiv:2507.20673.

    The clip is of the logarithm, where it removes the gradient: d is at most `clip_high` if A > 0 and at least
    -`clip_low` if A < 0 (0.4 both in the paper), and there at most log c with a `dual_clip` c above 1. Every token of a
    sequence carries the value of its sequence, which depends on all of its log-probs; so "seq-mean-token-mean" gives
    the objective of the paper, in value and gradient, and "token-mean" weighs the sequences by their length. A is the
    mean advantage of the sequence.

    Args:
        logprobs: (tokens,) nats, of the policy in training; only they have a gradient.
        old_logprobs: (tokens,) nats, of the policy at the start of the iteration.
        advantages: (tokens,) float.
        mask: (tokens,) bool, true on tokens that count.
        sequence_ids: (tokens,) int64, equal for tokens of one sequence, all of which are in the micro-batch.
        clip_low: distance of the lower bound of d from 0, nats.
        clip_high: distance of the upper bound of d from 0, nats.
        dual_clip: c, or None for no bound.

    Returns:
        (tokens,) loss, and the metrics `ratio` (of the token, not clipped), `clip_fraction_low`,
        `clip_fraction_high` (1 where the clip removes the token's gradient at that end) and `approx_kl` (k3 estimate of
        KL(old || new) by token, nats).
    """
    check_clips(clip_low, clip_high, dual_clip)
    difference = masked(mask, logprobs) - masked_constant(mask, old_logprobs)
    advantages = masked_constant(mask, sequence_means(masked_constant(mask, advantages), mask, sequence_ids))
    highest = math.inf if dual_clip is None else math.log(dual_clip)
    clipped = torch.where(advantages > 0, difference.clamp(max=clip_high), difference.clamp(-clip_low, highest))
    loss = masked(mask, -advantages * torch.exp(sequence_means(clipped, mask, sequence_ids)))
    metrics = clip_metrics(difference, advantages, mask, -clip_low, clip_high)
    return loss, metrics | ratio_metrics(difference.exp(), mask, difference)
