"""Rotary position embeddings (arXiv:2104.09864) in float32, each one kernel on a GPU.

A rotary pair is two elements of a head that are rotated together: one half of the head apart as in Llama, or neighbours
as in some models of DeepSeek. The inverse rotation is the derivative, so that the backward pass needs no input.

Shapes: x (T, heads, d + n), of which d elements are rotated; cos and sin (T, 1, d) float32, with two equal halves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl_mg.megatron.core_version import fused


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first d elements of each head of x (T, heads, d + n), whose pairs are d / 2 apart; copies the others.

    `cos`, `sin`: (T, 1, d) float32, both halves equal.
    """
    rotated: Tensor = _Rotation.apply(x, cos, sin)
    return rotated


def rotate_end(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """Rotates the last d elements of each head, and copies the others.

    With `neighbours` the result has the first elements of all pairs before the second ones. Where queries and keys are
    permuted so, their products are unchanged.
    """
    rotated: Tensor = _RotationOfEnd.apply(x, cos, sin, neighbours)
    return rotated


def join_rotated(plain: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """Appends to each head (T, heads, n) the rotated elements (T, 1, d) that all heads share."""
    joined: Tensor = _Join.apply(plain, shared, cos, sin, neighbours)
    return joined


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # Nothing of the size of an activation: all layers share these two.
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1.0), None, None


class _RotationOfEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.neighbours = neighbours
        return _end_rotated(x, cos, sin, neighbours)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _end_rotated_back(grad, cos, sin, ctx.neighbours), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.neighbours = neighbours
        return _joined(plain, shared, cos, sin, neighbours)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        plain, end = _parts(grad, cos)
        return plain, _summed_back(end, cos, sin, ctx.neighbours), None, None, None


@fused
def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    width = cos.shape[-1]
    half = width // 2
    # Angles and products are float32, and the result is rounded once.
    wide = x[..., :width].float()
    rotated = wide * cos
    rotated[..., :half].addcmul_(wide[..., half:], sin[..., :half], value=-direction)
    rotated[..., half:].addcmul_(wide[..., :half], sin[..., half:], value=direction)
    rotated = rotated.to(x.dtype)
    return rotated if width == x.shape[-1] else torch.cat([rotated, x[..., width:]], dim=-1)


@fused
def _end_rotated(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    plain, end = _parts(x, cos)
    return torch.cat([plain, _turned(end, cos, sin, neighbours)], dim=-1)


@fused
def _end_rotated_back(grad: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    plain, end = _parts(grad, cos)
    return torch.cat([plain, _turned_back(end.float(), cos, sin, neighbours).to(grad.dtype)], dim=-1)


@fused
def _joined(plain: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    rotated = _turned(shared, cos, sin, neighbours)
    return torch.cat([plain, rotated.expand(-1, plain.shape[1], -1)], dim=-1)


@fused
def _summed_back(grad: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    # The heads share the elements: their gradients are summed in float32, before the one rotation back.
    summed = grad.sum(1, keepdim=True, dtype=torch.float32)
    return _turned_back(summed, cos, sin, neighbours).to(grad.dtype)


def _parts(x: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    width = cos.shape[-1]
    return x[..., : x.shape[-1] - width], x[..., x.shape[-1] - width :]


def _turned(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    a, b = (x[..., 0::2], x[..., 1::2]) if neighbours else x.chunk(2, dim=-1)
    cos, sin = _of_pairs(cos, sin)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)  # float32, as `cos`


def _turned_back(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = _of_pairs(cos, sin)
    pairs = a * cos + b * sin, b * cos - a * sin
    return torch.stack(pairs, dim=-1).flatten(-2) if neighbours else torch.cat(pairs, dim=-1)


def _of_pairs(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    half = cos.shape[-1] // 2
    return cos[..., :half], sin[..., :half]
