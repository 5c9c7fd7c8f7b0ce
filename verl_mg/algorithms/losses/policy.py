"""Policy losses of single tokens.

Shapes and units of all: `logprobs` (tokens,) nats, of the policy in training, through which alone the gradient flows;
`old_logprobs` (tokens,) nats, of the policy at the start of the iteration; `advantages` (tokens,); `mask` (tokens,)
bool, true on tokens that count. r is the ratio exp(logprobs - old_logprobs), A the advantage.
"""

import torch
from torch import Tensor

from verl_mg.algorithms.losses.columns import (
    Metrics,
    check_clips,
    check_positive,
    clip_metrics,
    constant,
    inside,
    ratio_metrics,
)


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """The clipped surrogate of PPO (arXiv:1707.06347, equation 7), negated.

    max(-A r, -A clip(r, 1 - low, 1 + high)). Unequal `clip_low` and `clip_high` are DAPO's clip-higher
    (arXiv:2503.14476, section 3.1). `dual_clip`, a number c above 1, bounds the loss by -A c where A < 0
    (arXiv:1912.09729, equation 5).

    Returns:
        (tokens,) loss, and the metrics `ratio`, `clip_fraction_low`, `clip_fraction_high` (1 where the clip
        cuts the gradient at that end) and `approx_kl` (k3 estimate of KL(old || new), nats).
    """
    check_clips(clip_low, clip_high, dual_clip)
    advantages = constant(mask, advantages)
    difference = inside(mask, logprobs) - constant(mask, old_logprobs)
    ratio = torch.exp(difference)
    low, high = 1 - clip_low, 1 + clip_high
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return loss, clip_metrics(ratio, advantages, mask, low, high) | ratio_metrics(ratio, mask, difference)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Metrics]:
    """-clip(r, 1 - low, 1 + high) A logprobs, the clipped ratio a constant: CISPO, arXiv:2506.13585.

    The weight of a token is clipped, its gradient never cut. The paper leaves the lower end open: `clip_low` 1.

    Returns:
        (tokens,) loss, and the metrics `ratio`, `clip_fraction_low`, `clip_fraction_high` (1 where the weight is
        clipped at that end, whatever A is) and `approx_kl` (k3 estimate of KL(old || new), nats).
    """
    check_clips(clip_low, clip_high)
    advantages, logprobs = constant(mask, advantages), inside(mask, logprobs)
    difference = logprobs.detach() - constant(mask, old_logprobs)
    ratio = torch.exp(difference)
    low, high = 1 - clip_low, 1 + clip_high
    clipped = {"clip_fraction_low": mask & (ratio < low), "clip_fraction_high": mask & (ratio > high)}
    metrics = {name: where.to(ratio.dtype) for name, where in clipped.items()}
    return -ratio.clamp(low, high) * advantages * logprobs, metrics | ratio_metrics(ratio, mask, difference)


def gpg_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
    """-A logprobs, the plain policy gradient: GPG, arXiv:2504.02546. For one update an iteration.

    Returns:
        (tokens,) loss, and no metrics.
    """
    return -constant(mask, advantages) * inside(mask, logprobs), {}


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, Metrics]:
    """-A (4 / tau) sigmoid(tau (r - 1)): the soft gate of SAPO in place of a clip, arXiv:2511.20347.

    tau is `tau_positive` where A > 0, else `tau_negative`. The gradient is that of -A r times 4 p (1 - p), with p the
    sigmoid: all of it at r = 1, less and less away from there, the faster the higher tau.

    Returns:
        (tokens,) loss, and the metrics `ratio`, `gate` (4 p (1 - p), the share of the gradient that is left) and
        `approx_kl` (k3 estimate of KL(old || new), nats).
    """
    check_positive("tau_positive", tau_positive, "1.0")
    check_positive("tau_negative", tau_negative, "1.05")
    advantages = constant(mask, advantages)
    difference = inside(mask, logprobs) - constant(mask, old_logprobs)
    ratio = torch.exp(difference)
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    opened = torch.sigmoid(tau * (ratio - 1))
    left = constant(mask, 4 * opened * (1 - opened))
    return -advantages * opened * 4 / tau, {"gate": left} | ratio_metrics(ratio, mask, difference)
