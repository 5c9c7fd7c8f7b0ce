"""Biases of experts, and the clamped activation between their two products, as gpt-oss has them.

    gate_up = x W1 + b1      rows of W1 and b1 alternate between gate and up
    y       = p (a W2 + b2)  = (p a) W2 + p b2, where a is the activation and p the weight of the expert

The factor p is applied to a and to b2, so that the second product needs no copy of its result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl_mg.megatron.core_version import fused
from verl_mg.models.hf_config import ClampedSwiGLU


def add_bias(product: Tensor, bias: Tensor, ends: Tensor, scale: Tensor | None = None, added: bool = True) -> Tensor:
    """Adds to each token (n, w), sorted by expert and changed in place, the bias of its expert times `scale` (n,).

    `ends` (experts,) int32: where the tokens of each expert end. `added=False`: another rank adds the bias to its part
    of the sum; it has its whole gradient here too.
    """
    total: Tensor = _AddBias.apply(product, bias, ends, scale, added)
    return total


def clamped_swiglu(x: Tensor, scale: Tensor, activation: ClampedSwiGLU) -> Tensor:
    """Computes the clamped SwiGLU of (n, 2 f) times a factor (n,); the backward pass needs only the arguments."""
    product: Tensor = _ClampedSwiGLU.apply(x, scale, activation.alpha, activation.limit)
    return product


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor, ends: Tensor, scale: Tensor | None, added: bool) -> Tensor:
        # Not the product, which the gradients do not depend on: it may be overwritten.
        ctx.save_for_backward(bias, ends, scale)
        ctx.added = added
        ctx.mark_dirty(product)
        if added:
            rows = bias.index_select(0, _experts(ends, len(product)))
            product += rows if scale is None else (rows * scale[:, None]).to(product.dtype)
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor | None, None]:
        bias, ends, scale = ctx.saved_tensors
        wide, bias_grad, scale_grad = grad.float(), None, None
        if ctx.needs_input_grad[1]:
            weighted = wide if scale is None else wide * scale[:, None]
            sizes = torch.diff(ends, prepend=ends.new_zeros(1)).long()
            # A sum in the order of the tokens, which an addition at indices does not have on GPUs. Unsafe, for checks
            # of the lengths would make the host wait for the device.
            bias_grad = torch.segment_reduce(weighted, "sum", lengths=sizes, axis=0, unsafe=True).to(bias.dtype)
        if ctx.needs_input_grad[3] and ctx.added:
            scale_grad = (wide * bias.index_select(0, _experts(ends, len(grad)))).sum(-1)
        return grad, bias_grad, None, scale_grad, None


def _experts(ends: Tensor, tokens: int) -> Tensor:
    """Returns the expert of each token, (tokens,) int32."""
    return torch.bucketize(torch.arange(tokens, dtype=ends.dtype, device=ends.device), ends, right=True, out_int32=True)


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.constants = alpha, limit
        return _clamped(x, scale, alpha, limit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, scale = ctx.saved_tensors
        return *_clamped_backward(grad, x, scale, *ctx.constants), None, None


@fused
def _clamped(x: Tensor, scale: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = x[..., ::2].float().clamp(max=limit), x[..., 1::2].float().clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate) * scale[:, None]).to(x.dtype)


@fused
def _clamped_backward(grad: Tensor, x: Tensor, scale: Tensor, alpha: float, limit: float) -> tuple[Tensor, Tensor]:
    gate, up = x[..., ::2].float(), x[..., 1::2].float()
    inside, within = gate <= limit, up.abs() <= limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    gain = torch.sigmoid(alpha * gate)
    activated, grad = gate * gain, grad.float()
    scale_grad = (grad * activated * up).sum(-1)
    grad = grad * scale[:, None]
    gate_grad = grad * up * gain * (1 + alpha * gate * (1 - gain)) * inside
    up_grad = grad * activated * within
    return torch.stack((gate_grad, up_grad), dim=-1).flatten(-2).to(x.dtype), scale_grad
