"""Clip-Cov and KL-Cov: PPO except for the tokens that reduce the entropy most (arXiv:2505.22617).

The measure of a token is the covariance of its log-prob and its advantage. Which tokens are selected depends on all
tokens of the update, so they are selected before it, on the batch of a recipe, and given to the loss as a column:

    means        moments(logprobs, mask), moments(advantages, mask) of `advantages.whitening`, added over ranks
    covariance   covariances(...) of each token
    how many     k = share_count(tokens of all ranks, fraction)
    KL-Cov       threshold: the k-th largest covariance of all ranks; tokens_at_least(covariance, mask, threshold)
    Clip-Cov     candidates: tokens_between(covariance, mask, low, high); then as KL-Cov with `priorities` instead of
                 covariances and the candidates instead of the mask

Then no split, order or packing of the rows changes the choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_mg.algorithms import kl
from verl_mg.algorithms.losses.policy import Metrics, clipped_policy_loss, masked, masked_constant
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


def covariances(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, logprob_moments: Tensor, advantage_moments: Tensor
) -> Tensor:
    """Returns (tokens,) float64 (logprob - mean logprob) (advantage - mean advantage), 0 outside the mask.

    Args:
        logprobs, advantages, mask: (tokens,) float, float and bool; of the policy at the start of the update.
        logprob_moments, advantage_moments: (3,) float64, `whitening.moments` of either, added over all ranks.
    """
    product = torch.ones_like(logprobs, dtype=torch.float64)
    for column, moments in ((logprobs, logprob_moments), (advantages, advantage_moments)):
        product = product * (column.detach().double() - moments[1] / moments[0].clamp(min=1))
    return masked(mask, product)


def share_count(tokens: int, fraction: float) -> int:
    """Returns the number of tokens that a fraction of all is, rounded down, and at least 1.

    Args:
        tokens: masked tokens of all ranks.
        fraction: above 0, up to 1; 2e-4 for Clip-Cov and 2e-3 for KL-Cov in the paper.
    """
    if not 0 < fraction <= 1:
        raise UserError(f"fraction is {fraction}. Write a number above 0, up to 1, as in 0.0002")
    return max(1, int(tokens * fraction))


def tokens_at_least(values: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Returns (tokens,) bool: masked tokens whose value is `threshold` or more, so with ties more than k.

    Args:
        values, mask, threshold: (tokens,) float, (tokens,) bool and the k-th largest value of all ranks.
    """
    return mask & (values >= threshold)


def tokens_between(values: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """Returns (tokens,) bool: masked tokens whose value is above `low` and below `high`.

    Args:
        values, mask: (tokens,) float and bool.
        low, high: bounds; 1 and 5 in the paper.
    """
    if not low < high:
        raise UserError(f"no covariance is between {low} and {high}. Write the lower bound first, as in 1.0 and 5.0")
    return mask & (values > low) & (values < high)


def priorities(sample_ids: Tensor, positions: Tensor, seed: int) -> Tensor:
    """Returns (tokens,) float64, uniform in (0, 1): a function of seed, sample and position only.

    Args:
        sample_ids, positions: (tokens,) int64; ids unique over the run, places in the row.
        seed: seed that includes the iteration.
    """
    # A hash instead of a generator: a token's number does not depend on which rank has it, or after which others.
    mixed = _mix(torch.full_like(sample_ids, seed))
    for part in (sample_ids, positions):
        mixed = _mix(mixed ^ _mix(part))
    return (_shifted(mixed, 12).double() + 0.5) * 2.0**-52


def clip_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cut: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Returns `clipped_policy_loss` without the tokens that are cut: Clip-Cov, arXiv:2505.22617.

    Args:
        cut: (tokens,) bool, drawn at random among tokens of high covariance; their loss is 0. Also a metric.
        logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip: as in `clipped_policy_loss`.
    """
    loss, metrics = clipped_policy_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip)
    return masked(~cut, loss), metrics | {"cut": (mask & cut).to(loss.dtype)}


def kl_cov_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, penalized: Tensor, coefficient: float
) -> tuple[Tensor, Metrics]:
    """Returns -A r, plus on the selected tokens a KL penalty to the old policy: KL-Cov, arXiv:2505.22617.

    The penalty is coefficient |logprobs - old_logprobs|, as in the published code. Its gradient is 0 where the two
    are equal, so it acts from the second update of an iteration on. Metrics: `ratio`, `penalized`, and
    `abs_kl`, |logprobs - old_logprobs| in nats.

    Args:
        logprobs, old_logprobs, advantages, mask: as in `clipped_policy_loss`.
        penalized: (tokens,) bool, the tokens of the highest covariance.
        coefficient: 0 or more; 1 in the paper.
    """
    if not coefficient >= 0:
        raise UserError(f"the KL-Cov coefficient is {coefficient}. Write 0 or more, as in 1.0")
    difference = masked(mask, logprobs) - masked_constant(mask, old_logprobs)
    ratio, distance = torch.exp(kl.bounded(difference)), difference.abs()
    loss = -masked_constant(mask, advantages) * ratio + coefficient * masked(penalized, distance)
    return loss, {
        "ratio": masked(mask, ratio.detach()),
        "penalized": (mask & penalized).to(loss.dtype),
        "abs_kl": distance.detach(),
    }


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014) after a step of its counter, in wrapping int64."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    # int64 >> copies the sign; the mask makes it the shift of unsigned numbers.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64)  # the int64 with these 64 bits, of which the first is set
