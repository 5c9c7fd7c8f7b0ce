"""Weight gradients that are added to a gradient buffer by the matrix product itself, in float32.

`Transformer Engine` and Apex have such a kernel; here torch's matrix product is given the buffer as its output. The
functions below have the names and arguments of Apex's module `fused_weight_gradient_mlp_cuda`, which megatron-core's
linear layers call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def wgrad_gemm_accum_fp32(inputs: Tensor, grad: Tensor, buffer: Tensor) -> None:
    """Adds grad.T @ inputs to a float32 buffer: (n, out), (n, in) -> (out, in)."""
    if inputs.dtype is buffer.dtype:
        buffer.addmm_(grad.T, inputs)
    # GPU: one product of 16-bit matrices adds to the float32 buffer, without rounding to 16 bits.
    # GPU-TEST: tests/megatron/test_fake_cuda.py::test_train_family_on_cuda_has_values_of_transformers
    # GPU-RAN: h200-1
    elif inputs.device.type == "cuda":
        torch.addmm(buffer, grad.T, inputs, out_dtype=buffer.dtype, out=buffer)
    else:
        # The CPU has no product of half-precision matrices with a float32 result.
        buffer.addmm_(grad.T.to(buffer.dtype), inputs.to(buffer.dtype))


def wgrad_gemm_accum_fp16(inputs: Tensor, grad: Tensor, buffer: Tensor) -> None:
    """Adds grad.T @ inputs to a buffer (out, in) of the same half-precision type."""
    buffer.addmm_(grad.T, inputs)


def gradient_buffer(weight: Tensor, fused: bool) -> Tensor | None:
    """Returns the buffer to which gradients of a weight are added; None if autograd must return them."""
    return getattr(weight, "main_grad", None) if fused else None


def added_to_buffer(weight: Any) -> Tensor:
    """Marks that the gradient of a weight has been added to its buffer, and returns a gradient for autograd."""
    # megatron-core's hooks run only where autograd has a gradient, and do not read its values; except of a weight that
    # gets a second gradient by autograd, such as a tied embedding, to which zeros are added.
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
