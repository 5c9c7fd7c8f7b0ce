"""Per-token estimates of KL(policy || reference) from the log-probabilities of sampled tokens, and their uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_import("torch")


def bounded(log_ratios: Tensor) -> Tensor:
    """Returns (...) log-ratios in nats, at most nine tenths of the logarithm of the largest number of their dtype.

    79.8 nats in float32 and bfloat16, 638 in float64: what is made of their exponentials is finite. Beyond the bound a
    ratio is a constant, without a gradient.

    Args:
        log_ratios: (...) float, nats.
    """
    # The derivative of an infinite ratio is 0 * inf = NaN wherever a clip or an advantage of 0 leaves none, and one
    # such token would cost the whole mini-batch. The tenth is for advantages and for sums over tokens.
    return log_ratios.clamp(max=0.9 * math.log(torch.finfo(log_ratios.dtype).max))


def _k3(difference: Tensor) -> Tensor:
    # r - 1 - log r with r = reference / policy; expm1 keeps the digits where the two nearly agree.
    log_ratio = bounded(-difference)
    return torch.expm1(log_ratio) - log_ratio


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: difference,
    "abs": lambda difference: difference.abs(),
    "k2": lambda difference: 0.5 * difference.square(),
    "k3": _k3,
}

STRAIGHT_THROUGH = {"k1+": "k1", "k3+": "k3"}  # estimators with the value of another one and the gradient of "k2"


def penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Returns (...) a one-sample estimate of KL(policy || reference) in nats, for each token that the policy sampled.

    With d = logprobs - ref_logprobs (Schulman, "Approximating KL Divergence", 2020):

        kind    value             expectation of the value   expectation of the gradient, as a loss
        "k1"    d                 the KL                     0: nothing is learned
        "abs"   |d|               above the KL               of no divergence
        "k2"    d^2 / 2           near the KL                the gradient of the KL
        "k3"    exp(-d) - 1 + d   the KL                     the gradient of KL(reference || policy)
        "k1+"   d                 the KL                     the gradient of the KL
        "k3+"   exp(-d) - 1 + d   the KL                     the gradient of the KL

    "k2", "k3" and "k3+" are never negative. In a reward, where no gradient flows, take "k1" or "k3"; in a loss "k2"
    or a straight-through form, "k1+" or "k3+", of which the value is reported and "k2" differentiated. The
    expectations are over tokens of the policy in training: off-policy, all need its ratio as a weight.

    The log-ratio -d of "k3" is `bounded`: where the reference finds a token more than e^79 times likelier, its value is
    that at the bound and its gradient 0. Set entries that are no log-probabilities to 0 before the call: the gradient
    of a NaN is NaN even if masked later.

    Args:
        logprobs, ref_logprobs: (...) nats.
        kind: one of the above; UserError for any other.
    """
    if kind not in ESTIMATORS and kind not in STRAIGHT_THROUGH:
        raise UserError(f"KL estimator {kind!r} is unknown. Write one of {', '.join([*ESTIMATORS, *STRAIGHT_THROUGH])}")
    difference = logprobs - ref_logprobs
    if kind in ESTIMATORS:
        return ESTIMATORS[kind](difference)
    # The value comes from the first term; the second one is 0 and has the gradient.
    differentiated = ESTIMATORS["k2"](difference)
    return ESTIMATORS[STRAIGHT_THROUGH[kind]](difference).detach() + (differentiated - differentiated.detach())


def in_reward(
    token_rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coefficient: float, kind: str = "k1"
) -> Tensor:
    """Returns (...) token rewards minus coefficient times penalty, 0 outside the mask: arXiv:2203.02155, equation 2.

    Args:
        token_rewards: (...) float.
        logprobs, ref_logprobs: (...) nats; the former of the policy that wrote the tokens.
        mask: (...) bool; values outside it are ignored, NaN too.
        coefficient: reward per nat.
        kind: as in `penalty`.
    """
    new, reference = (torch.where(mask, column.detach(), 0.0) for column in (logprobs, ref_logprobs))
    return torch.where(mask, token_rewards - coefficient * penalty(new, reference, kind), 0.0)


def adapted(coefficient: float, observed: float, target: float, horizon: float, samples: int) -> float:
    """Returns the coefficient that steers the KL to its target: arXiv:1909.08593, section 2.2.

    coefficient * (1 + e samples / horizon) with the error e = observed / target - 1, clipped to -0.2 and 0.2:
    coefficient 0.1, twice the target, 1000 samples, horizon 10000: 0.1 (1 + 0.2 / 10) = 0.102.

    Args:
        coefficient, samples: coefficient of the last iteration, and the number of its samples.
        observed, target: mean KL of its samples and the wanted one (above 0), in nats, both per token or response.
        horizon: samples over which an error of 1 would double the coefficient if it were not clipped; above 0.
    """
    for name, value in (("target", target), ("horizon", horizon)):
        if not value > 0:
            raise UserError(f"the {name} of an adaptive KL coefficient is {value}. Write a number above 0")
    error = min(max(observed / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * samples / horizon)
