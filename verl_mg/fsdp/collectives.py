"""Collectives with gradients, as models use them between ranks that share tokens or tensors.

                     forward      backward
    sum_values       all-reduce   identity      outputs of ranks with different tokens, the same loss on all
    sum_gradients    identity     all-reduce    inputs that all ranks have, of which each uses a part

Without a group each is the identity.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        # A copy, for autograd may still need the values.
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_values(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sums values over the ranks of a group; each rank's gradient is that of the sum."""
    total: Tensor = _SumForward.apply(values, group) if group is not None else values
    return total


def sum_gradients(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns values as they are; the gradients of all ranks are summed in the backward pass."""
    same: Tensor = _SumBackward.apply(values, group) if group is not None else values
    return same
