"""Per-token losses over flat (tokens,) tensors; `aggregation` turns them into one number.

A loss returns its value for each token, exactly 0 outside the mask, and a dictionary of detached per-token
metrics, also 0 outside it, of which the caller reports the mean over all masked tokens of all ranks.
What stands outside the mask may be anything, NaN too: it reaches neither value nor gradient.
"""

import torch
from torch import Tensor

from verl_mg.algorithms import kl
from verl_mg.errors import UserError

Metrics = dict[str, Tensor]


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

    With r = exp(logprobs - old_logprobs) and A the advantage: max(-A r, -A clip(r, 1 - low, 1 + high)).
    Unequal `clip_low` and `clip_high` are DAPO's clip-higher (arXiv:2503.14476, section 3.1). `dual_clip`, a
    number c above 1, bounds the loss by -A c where A < 0 (arXiv:1912.09729, equation 5).

    Args:
        logprobs: (tokens,) nats, of the policy in training; the gradient flows through these alone.
        old_logprobs: (tokens,) nats, of the policy at the start of the iteration.
        advantages: (tokens,).
        mask: (tokens,) bool, true on tokens that count.

    Returns:
        (tokens,) loss, and the metrics `ratio`, `clip_fraction_low`, `clip_fraction_high` (1 where the clip
        cuts the gradient at that end) and `approx_kl` (k3 estimate of KL(old || new), nats).
    """
    _check_clips(clip_low, clip_high, dual_clip)
    # Masking what goes into exp, not only what comes out: a zero gradient times an infinite slope is NaN.
    logprobs = torch.where(mask, logprobs, 0.0)
    old_logprobs = torch.where(mask, old_logprobs, 0.0).detach()
    advantages = torch.where(mask, advantages, 0.0).detach()

    ratio = torch.exp(logprobs - old_logprobs)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)

    seen = ratio.detach()
    metrics = {
        "ratio": torch.where(mask, seen, 0.0),
        "clip_fraction_low": ((seen < 1 - clip_low) & (advantages < 0)).to(loss.dtype),
        "clip_fraction_high": ((seen > 1 + clip_high) & (advantages > 0)).to(loss.dtype),
        "approx_kl": kl.penalty(old_logprobs, logprobs.detach(), "k3"),
    }
    return loss, metrics


def sft_loss(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood: (tokens,) nats from `logprobs` (tokens,) nats and `mask` (tokens,) bool."""
    return torch.where(mask, -logprobs, 0.0), {}


def _check_clips(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not value >= 0:
            raise UserError(f"{name} is {value}; write 0 or more, as in 0.2")
    if dual_clip is not None and not dual_clip > 1:
        raise UserError(f"dual_clip is {dual_clip}; write a number above 1, as in 3.0, or leave it out")
