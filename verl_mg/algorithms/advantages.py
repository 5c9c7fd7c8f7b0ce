"""Advantage estimators: from rewards to how much better than expected a sample or a token was."""

import torch
from torch import Tensor

STD_FLOOR = 1e-6  # keeps a group whose scores nearly agree finite


def group_relative(scores: Tensor, groups: Tensor, normalize_std: bool = True) -> Tensor:
    """How much better a sample scored than the other samples of its prompt.

    The score minus the mean of its group, divided by the group's (unbiased) standard deviation plus 1e-6 when
    `normalize_std`: GRPO with outcome supervision, arXiv:2402.03300, section 4.1.2. Without the division:
    Dr. GRPO, arXiv:2503.20783, section 3.2. A group of one has advantage 0.

    Args:
        scores: (n,) float, in any unit; the result has their dtype, the sums are made in float64.
        groups: (n,) int64, equal for samples of one prompt; neither sorted nor consecutive.

    Returns:
        (n,) advantages. The order of the rows changes no bit of them.
    """
    # Sums run in an order that the values alone decide, so neither row order nor the device's atomics matter.
    order = torch.argsort(scores, stable=True)
    order = order[torch.argsort(groups[order], stable=True)]
    _, index, counts = torch.unique_consecutive(groups[order], return_inverse=True, return_counts=True)

    ordered = scores[order].double()
    advantages = ordered - (_segment_sums(ordered, counts) / counts)[index]
    if normalize_std:
        variance = _segment_sums(advantages.square(), counts) / (counts - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + STD_FLOOR)[index]
    return torch.empty_like(scores).index_copy_(0, order, advantages.to(scores.dtype))


def _segment_sums(values: Tensor, counts: Tensor) -> Tensor:
    """Sums (g,) of consecutive runs of `values` (n,), the i-th of them `counts[i]` long."""
    # unsafe: skips the check of the lengths, which stumbles over a batch without rows.
    return torch.segment_reduce(values, "sum", lengths=counts, unsafe=True)
