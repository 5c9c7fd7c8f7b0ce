"""Policy losses of single tokens; before them, masked columns, metrics and checks that other losses use too.

r is a token's ratio exp(logprobs - old_logprobs) and A its advantage:

    logprobs       (tokens,) nats, of the policy in training; only they have a gradient
    old_logprobs   (tokens,) nats, of the policy at the start of the iteration
    advantages     (tokens,) float
    mask           (tokens,) bool, true on tokens that count

r is the exponential of a log-ratio that is `kl.bounded`, far beyond what a policy can learn from: values and gradients
are finite for any log-probs, and 0 where a clip or the advantage says so.

Unless a function says otherwise, its metrics are `ratio` (r), `clip_fraction_low`, `clip_fraction_high` (1 where the
clip removes the gradient at that end) and `approx_kl` (k3 estimate of KL(old || new), nats). PPO with clips of 0.2:

    r = 1.5, A = 1     loss -1.2, no gradient: already far enough
    r = 1.5, A = -1    loss 1.5, with gradient: the surrogate is the larger loss
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from verl_mg.algorithms import kl
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")

Metrics: TypeAlias = "dict[str, Tensor]"


def masked(mask: Tensor, values: Tensor) -> Tensor:
    """Returns (...) values with 0 outside the mask, from where no gradient comes, whatever the values there.

    Args:
        mask, values: (...) bool and float.
    """
    # Not a product: 0 times NaN or infinity is NaN, in the value and in the gradient.
    return torch.where(mask, values, 0.0)


def masked_constant(mask: Tensor, values: Tensor) -> Tensor:
    """Returns (...) values with 0 outside the mask, and without any gradient.

    Args:
        mask, values: (...) bool and float.
    """
    return masked(mask, values).detach()


def ratio_metrics(ratio: Tensor, mask: Tensor, difference: Tensor) -> Metrics:
    """Returns `ratio`, and `approx_kl`, the k3 estimate of KL(old || new) in nats, by token.

    Args:
        ratio, mask: (tokens,) float and bool.
        difference: (tokens,) new minus old log-probs, in nats.
    """
    k3 = kl.ESTIMATORS["k3"](-difference.detach())
    return {"ratio": masked(mask, ratio.detach()), "approx_kl": masked(mask, k3)}


def clip_metrics(ratio: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Metrics:
    """Returns `clip_fraction_low` and `clip_fraction_high`, 1 where the clip removes the gradient at that end.

    Args:
        ratio, advantages, mask: (tokens,) float, float and bool.
        low, high: bounds of the ratio.
    """
    below, above = ratio.detach() < low, ratio.detach() > high
    return {
        "clip_fraction_low": (mask & below & (advantages < 0)).to(ratio.dtype),
        "clip_fraction_high": (mask & above & (advantages > 0)).to(ratio.dtype),
    }


def check_clips(clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """Raises UserError unless the clips are 0 or more and the dual clip is None or above 1.

    Args:
        clip_low, clip_high: distances of the bounds from 1.
        dual_clip: bound of the loss at negative advantages.
    """
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not value >= 0:
            raise UserError(f"{name} is {value}. Write 0 or more, as in 0.2")
    if dual_clip is not None and not dual_clip > 1:
        raise UserError(f"dual_clip is {dual_clip}. Write a number above 1, as in 3.0, or leave it out")


def check_positive(name: str, value: float, example: str) -> None:
    """Raises UserError unless the number is above 0.

    Args:
        name, value, example: key of the number, the number, and one to write instead.
    """
    if not value > 0:
        raise UserError(f"{name} is {value}. Write a number above 0, as in {example}")


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) the clipped surrogate of PPO (arXiv:1707.06347, equation 7), negated, and metrics.

    max(-A r, -A clip(r, 1 - low, 1 + high)). Unequal clips are DAPO's clip-higher (arXiv:2503.14476, section 3.1).

    Args:
        logprobs, old_logprobs, advantages, mask: see the module.
        clip_low, clip_high: distances of the bounds of r from 1.
        dual_clip: c above 1, where A < 0 the loss is at most -A c (arXiv:1912.09729, equation 5); None: no bound.
    """
    check_clips(clip_low, clip_high, dual_clip)
    advantages = masked_constant(mask, advantages)
    difference = masked(mask, logprobs) - masked_constant(mask, old_logprobs)
    ratio = torch.exp(kl.bounded(difference))
    low, high = 1 - clip_low, 1 + clip_high
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return loss, clip_metrics(ratio, advantages, mask, low, high) | ratio_metrics(ratio, mask, difference)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) -clip(r, 1 - low, 1 + high) A logprobs, r a constant: CISPO, arXiv:2506.13585.

    No gradient is removed: the clip fractions are 1 where the weight is clipped, whatever A is. The paper leaves the
    lower end open: `clip_low` 1.

    Args:
        logprobs, old_logprobs, advantages, mask: see the module.
        clip_low, clip_high: distances of the bounds of r from 1.
    """
    check_clips(clip_low, clip_high)
    advantages, logprobs = masked_constant(mask, advantages), masked(mask, logprobs)
    difference = logprobs.detach() - masked_constant(mask, old_logprobs)
    ratio = torch.exp(kl.bounded(difference))
    low, high = 1 - clip_low, 1 + clip_high
    clipped = {"clip_fraction_low": mask & (ratio < low), "clip_fraction_high": mask & (ratio > high)}
    metrics = {name: where.to(ratio.dtype) for name, where in clipped.items()}
    return -ratio.clamp(low, high) * advantages * logprobs, metrics | ratio_metrics(ratio, mask, difference)


def gpg_loss(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) -A logprobs, the plain policy gradient, and no metrics: GPG, arXiv:2504.02546.

    Args:
        logprobs, advantages, mask: see the module.
    """
    # Without a ratio it is for one update in an iteration.
    return -masked_constant(mask, advantages) * masked(mask, logprobs), {}


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) -A (4 / tau) sigmoid(tau (r - 1)), the soft gate of SAPO instead of a clip: arXiv:2511.20347.

    The gradient is that of -A r times 4 p (1 - p), with p the sigmoid: all of it at r = 1, less and less away from
    there, the faster the higher tau. Metrics: `ratio`, `gate` (4 p (1 - p), the share of the gradient that is left),
    `approx_kl`.

    Args:
        logprobs, old_logprobs, advantages, mask: see the module.
        tau_positive, tau_negative: tau where A > 0, and elsewhere.
    """
    check_positive("tau_positive", tau_positive, "1.0")
    check_positive("tau_negative", tau_negative, "1.05")
    advantages = masked_constant(mask, advantages)
    difference = masked(mask, logprobs) - masked_constant(mask, old_logprobs)
    ratio = torch.exp(kl.bounded(difference))
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    opened = torch.sigmoid(tau * (ratio - 1))
    left = masked_constant(mask, 4 * opened * (1 - opened))
    return -advantages * opened * 4 / tau, {"gate": left} | ratio_metrics(ratio, mask, difference)


def dppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    divergence: str,
    limit_low: float,
    limit_high: float,
    ratio_limit: float = 20.0,
) -> tuple[Tensor, Metrics]:
    """Returns (tokens,) -min(r, limit) A logprobs, r constant, 0 outside the trust region: DPPO, arXiv:2602.04879.

    A token is outside where its update would lead further away, r > 1 with A > 0 or r < 1 with A < 0, and the
    divergence of the two policies is above `limit_high` or `limit_low` (equation 12). The divergence is of the
    binary distributions "this token or another one", p the probability under the policy in training and q the old
    one:

        "tv"    abs(p - q)
        "kl"    q log(q / p) + (1 - q) log((1 - q) / (1 - p)), nats; 1 - p and 1 - q at least 1e-8

    Unlike a clip of the ratio this leaves rare tokens free and holds frequent ones. A token inside has the gradient
    of -r A, as the surrogate of PPO, up to `ratio_limit` (truncated importance sampling, section 5.4). One metric more:
    `divergence`.

    Args:
        logprobs, old_logprobs, advantages, mask: see the module; in the paper the old policy is the one that sampled.
        divergence: one of DIVERGENCES; UserError for any other.
        limit_low, limit_high: largest divergence of a token that becomes less, or more, probable.
        ratio_limit: largest weight of a token.
    """
    if divergence not in DIVERGENCES:
        raise UserError(f"divergence {divergence!r} is unknown. Write one of {', '.join(DIVERGENCES)}")
    for name, limit, example in (("limit_low", limit_low, "0.15"), ("limit_high", limit_high, "0.15")):
        check_positive(name, limit, example)
    check_positive("ratio_limit", ratio_limit, "20.0")
    advantages, logprobs = masked_constant(mask, advantages), masked(mask, logprobs)
    new, old = logprobs.detach(), masked_constant(mask, old_logprobs)
    distance = DIVERGENCES[divergence](new, old)
    outside = {
        "clip_fraction_low": (advantages < 0) & (new < old) & (distance > limit_low),
        "clip_fraction_high": (advantages > 0) & (new > old) & (distance > limit_high),
    }
    ratio = torch.exp(kl.bounded(new - old))
    kept = ~(outside["clip_fraction_low"] | outside["clip_fraction_high"])
    metrics = {name: where.to(ratio.dtype) for name, where in outside.items()}
    metrics["divergence"] = masked(mask, distance)
    loss = -advantages * torch.where(kept, ratio.clamp(max=ratio_limit), 0.0) * logprobs
    return loss, metrics | ratio_metrics(ratio, mask, new - old)


def _total_variation(new: Tensor, old: Tensor) -> Tensor:
    return (new.exp() - old.exp()).abs()


def _binary_kl(new: Tensor, old: Tensor) -> Tensor:
    others_new, others_old = (-torch.expm1(logprobs).clamp(max=-1e-8) for logprobs in (new, old))
    return old.exp() * (old - new) + others_old * (others_old / others_new).log()


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"tv": _total_variation, "kl": _binary_kl}
