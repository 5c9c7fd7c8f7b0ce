"""Masked columns, metrics and checks that several losses use."""

import torch
from torch import Tensor

from verl_mg.algorithms import kl
from verl_mg.errors import UserError

Metrics = dict[str, Tensor]


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
