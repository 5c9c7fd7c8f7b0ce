"""Whitening over the whole batch: each rank sums its own part, the sums are added, each scales its own part."""

import torch
from torch import Tensor

EPSILON = 1e-8  # avoids a division by 0 where all values are equal


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Returns (3,) float64 count, sum and sum of squares of the masked values, which add up over parts and ranks.

    Args:
        values, mask: (...) float and bool.
    """
    # float64: the variance is the small difference of two large sums.
    kept = values[mask].detach().double()
    return torch.stack([kept.new_tensor(float(kept.numel())), kept.sum(), kept.square().sum()])


def whiten(values: Tensor, mask: Tensor, moments: Tensor, shift_mean: bool = True) -> Tensor:
    """Returns (...) values with zero mean and unit (unbiased) variance over all ranks; 0 outside the mask.

    Args:
        values, mask: (...) float and bool.
        moments: (3,) float64, results of the function `moments` added over all ranks.
        shift_mean: false keeps the mean and only scales the deviations.
    """
    count, total, squares = moments.unbind()
    mean = total / count.clamp(min=1)
    variance = ((squares - mean * total) / (count - 1).clamp(min=1)).clamp(min=0)
    whitened = (values.detach().double() - mean) / (variance + EPSILON).sqrt()
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, 0.0).to(values.dtype)
