"""Whitening over the whole batch: each rank sums its own part, the sums are added, each scales its own part."""

import torch
from torch import Tensor

VARIANCE_FLOOR = 1e-8  # keeps values that all agree finite


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """What the mean and the variance of masked values are made of; it adds over parts and ranks.

    Args:
        values: (...) float.
        mask: (...) bool, the same shape.

    Returns:
        (3,) float64: how many there are, their sum, the sum of their squares.
    """
    kept = values[mask].detach().double()
    return torch.stack([kept.new_tensor(float(kept.numel())), kept.sum(), kept.square().sum()])


def whiten(values: Tensor, mask: Tensor, moments: Tensor, shift_mean: bool = True) -> Tensor:
    """Values of zero mean and unit (unbiased) variance over all that `moments` counts.

    Args:
        values: (...) float.
        mask: (...) bool, the same shape.
        moments: (3,) float64, the sum of what the function `moments` gave on every rank.
        shift_mean: false keeps the mean and scales the deviations alone.

    Returns:
        (...) of the dtype of `values`, 0 outside the mask.
    """
    count, total, squares = moments.unbind()
    mean = total / count.clamp(min=1)
    variance = ((squares - mean * total) / (count - 1).clamp(min=1)).clamp(min=0)
    whitened = (values.detach().double() - mean) / (variance + VARIANCE_FLOOR).sqrt()
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, 0.0).to(values.dtype)
