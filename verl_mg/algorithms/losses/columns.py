"""What all losses share: columns that are silent outside the mask, and sums over the tokens of a sequence."""

import torch
from torch import Tensor

from verl_mg.algorithms import kl
from verl_mg.algorithms.segments import totals
from verl_mg.errors import UserError

Metrics = dict[str, Tensor]


def inside(mask: Tensor, values: Tensor) -> Tensor:
    """The values with 0 outside the mask; no gradient comes from there, whatever it is that stands there."""
    return torch.where(mask, values, 0.0)


def constant(mask: Tensor, values: Tensor) -> Tensor:
    """`inside`, and no gradient at all."""
    return inside(mask, values).detach()


def sequence_sums(values: Tensor, ids: Tensor) -> Tensor:
    """For each token the sum over the tokens with its id: (tokens,) of the dtype of `values`, made in float64."""
    return totals(values, ids).to(values.dtype)


def sequence_means(values: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
    """For each token the mean over the masked tokens with its id; `values` is 0 outside the mask."""
    return (totals(values, ids) / totals(mask, ids).clamp(min=1)).to(values.dtype)


def ratio_metrics(ratio: Tensor, mask: Tensor, difference: Tensor) -> Metrics:
    """`ratio`, and `approx_kl` of the log-ratios `difference` = new - old: the k3 estimate of KL(old || new), nats."""
    k3 = kl.ESTIMATORS["k3"](-difference.detach())
    return {"ratio": inside(mask, ratio.detach()), "approx_kl": inside(mask, k3)}


def clip_metrics(ratio: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Metrics:
    """`clip_fraction_low` and `clip_fraction_high`: 1 where a clip to low and high cuts the gradient at that end."""
    below, above = ratio.detach() < low, ratio.detach() > high
    return {
        "clip_fraction_low": (mask & below & (advantages < 0)).to(ratio.dtype),
        "clip_fraction_high": (mask & above & (advantages > 0)).to(ratio.dtype),
    }


def check_clips(clip_low: float, clip_high: float, dual_clip: float | None = None) -> None:
    """UserError unless the clips are 0 or more and the dual clip above 1."""
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not value >= 0:
            raise UserError(f"{name} is {value}; write 0 or more, as in 0.2")
    if dual_clip is not None and not dual_clip > 1:
        raise UserError(f"dual_clip is {dual_clip}; write a number above 1, as in 3.0, or leave it out")


def check_positive(name: str, value: float, example: str) -> None:
    """UserError unless the number is above 0."""
    if not value > 0:
        raise UserError(f"{name} is {value}; write a number above 0, as in {example}")
