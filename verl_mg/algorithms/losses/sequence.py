"""Policy losses whose ratio is that of a whole sequence. Shapes and units as in `policy`, and:

`sequence_ids` (tokens,) int64, equal for tokens of one sequence, all of which are in the micro-batch. n is the number
of masked tokens of a sequence, d the log-ratio logprobs - old_logprobs of a token.
"""

import torch
from torch import Tensor

from verl_mg.algorithms.losses.columns import (
    Metrics,
    check_clips,
    clip_metrics,
    constant,
    inside,
    ratio_metrics,
    sequence_means,
)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """The clipped surrogate of the sequence ratio s = exp(sum of d / n): GSPO-token, arXiv:2507.18071, equation 14.

    max(-A s, -A clip(s, 1 - low, 1 + high)). s has the value of equation 7 and, for each token, the gradient of
    that token's log-prob alone; with equal advantages in a sequence and "seq-mean-token-mean" value and gradient are
    GSPO's, equation 5. The paper clips at 3e-4 and 4e-4.

    Returns:
        (tokens,) loss, and the metrics `ratio` (s), `clip_fraction_low`, `clip_fraction_high` (1 where the clip
        cuts the gradient at that end) and `approx_kl` (k3 estimate of KL(old || new) by token, nats).
    """
    check_clips(clip_low, clip_high)
    advantages, logprobs = constant(mask, advantages), inside(mask, logprobs)
    difference = logprobs.detach() - constant(mask, old_logprobs)
    sequence_ratio = torch.exp(sequence_means(difference, mask, sequence_ids))
    ratio = sequence_ratio * torch.exp(logprobs - logprobs.detach())
    low, high = 1 - clip_low, 1 + clip_high
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    return loss, clip_metrics(ratio, advantages, mask, low, high) | ratio_metrics(ratio, mask, difference)


def gmpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Metrics]:
    """-A times the geometric mean of the clipped token ratios of a sequence: GMPO, arXiv:2507.20673.

    The clip is of the logarithm, where it cuts the gradient: d is at most `clip_high` if A > 0 and at least
    -`clip_low` if A < 0 (0.4 both in the paper). Every token of a sequence carries the value of its sequence, which
    depends on all of its log-probs; so "seq-mean-token-mean" gives the objective of the paper, in value and
    gradient, and "token-mean" weighs the sequences by their length. A is the mean advantage of the sequence.

    Returns:
        (tokens,) loss, and the metrics `ratio` (of the token, not clipped), `clip_fraction_low`,
        `clip_fraction_high` (1 where the clip cuts the token's gradient at that end) and `approx_kl` (k3 estimate of
        KL(old || new) by token, nats).
    """
    check_clips(clip_low, clip_high)
    difference = inside(mask, logprobs) - constant(mask, old_logprobs)
    advantages = constant(mask, sequence_means(constant(mask, advantages), mask, sequence_ids))
    clipped = torch.where(advantages > 0, difference.clamp(max=clip_high), difference.clamp(min=-clip_low))
    loss = inside(mask, -advantages * torch.exp(sequence_means(clipped, mask, sequence_ids)))
    metrics = clip_metrics(difference, advantages, mask, -clip_low, clip_high)
    return loss, metrics | ratio_metrics(difference.exp(), mask, difference)
