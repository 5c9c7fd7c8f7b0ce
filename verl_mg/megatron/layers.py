"""Layers that megatron-core's local specification does not provide: norms, and gated activations of experts.

Queries and keys of MiniMax-M2 are normalized over all heads of a token together, which tensor-parallel ranks divide:

    x (..., heads / tp, d) -> sum of squares of these heads (..., 1) -> summed over the ranks -> x / rms * weight
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from verl_mg.megatron.core_version import activated, activation_gradient, fused


class RMSNorm(torch.nn.Module):
    """Root-mean-square layer normalization (arXiv:1910.07467), computed in float32 and rounded once."""

    # With `layernorm_zero_centered_gamma` it multiplies by 1 + its weight, in float32 too, as Gemma does.

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        options = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **options))
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        # Each tensor-parallel rank sees only its tokens: megatron-core sums such gradients over the group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last axis: (..., hidden_size) -> (..., hidden_size)."""
        # GPU: one kernel of torch in either direction.
        # GPU-TEST: tests/megatron/test_fake_cuda.py::
        # test_forward_of_a_layer_on_cuda_launches_at_most_these_kernels_and_waits_for_none
        # GPU-RAN: h200-1, h100-1
        if x.device.type == "cuda" and not self.zero_centered:
            # One kernel in either direction where input and weight have the same type.
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return _RMSNorm.apply(x, self.weight, self.eps, self.zero_centered)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm where torch has no kernel: on the CPU, and with 1 + weight."""

    # The backward pass needs only the input and one number for each token.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        normalized, inverse = _normalized(x, weight, eps, zero_centered)
        ctx.save_for_backward(x, weight, inverse)
        ctx.zero_centered = zero_centered
        return normalized

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        return (*_norm_gradients(grad, x, weight, inverse, ctx.zero_centered, ctx.needs_input_grad[1]), None, None)


@fused
def _normalized(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_() / x.shape[-1]
    inverse = mean_square.add_(eps).rsqrt_()
    return (x * inverse).mul_(_factor(weight, zero_centered)).to(x.dtype), inverse


@fused
def _norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, zero_centered: bool, needs_weight_grad: bool
) -> tuple[Tensor, Tensor | None]:
    factor, weight_grad = _factor(weight, zero_centered).float(), None
    x, grad, dtype = x.float(), grad.float(), x.dtype
    # x is multiplied with the numbers of its tokens, `inverse`, in sums and not in a further pass.
    products = x * grad
    if needs_weight_grad:
        weight_grad = products.flatten(0, -2).T.mv(inverse.flatten()).to(weight.dtype)
    projection = (products @ factor).unsqueeze(-1).mul_(inverse.square()).div_(x.shape[-1])
    return (grad * factor).addcmul_(x, projection, value=-1).mul_(inverse).to(dtype), weight_grad


def _factor(weight: Tensor, zero_centered: bool) -> Tensor:
    return 1.0 + weight.float() if zero_centered else weight


def gated(x: Tensor, scale: Tensor, gelu: bool) -> Tensor:
    """Computes act(gate) * up * scale of (n, 2 f) and (n,) float32; the backward pass needs only the arguments."""
    return _Gated.apply(x, scale, gelu)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, gelu: bool) -> Tensor:
        ctx.save_for_backward(x, scale)
        ctx.gelu = gelu
        return _gated(x, scale, gelu)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale = ctx.saved_tensors
        return *_gated_backward(grad, x, scale, ctx.gelu), None


@fused
def _gated(x: Tensor, scale: Tensor, gelu: bool) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    # In place, here and below: less memory where this is not compiled, the same kernel where it is.
    return activated(gate.float(), gelu).mul_(up).mul_(scale[:, None]).to(x.dtype)


@fused
def _gated_backward(grad: Tensor, x: Tensor, scale: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    gate, up = x.float().chunk(2, dim=-1)
    factor, grad = activated(gate, gelu), grad.float()
    scale_grad = (grad * factor).mul_(up).sum(-1)
    grad = grad * scale[:, None]
    gate_grad = activation_gradient(grad * up, gate, gelu)
    return torch.cat((gate_grad, grad.mul_(factor)), dim=-1).to(x.dtype), scale_grad


class NormedRowParallelLinear(RowParallelLinear):
    """Row-parallel linear layer whose output is normalized, as in Gemma 2; named as Megatron-Bridge names it."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **arguments: Any) -> None:
        super().__init__(input_size, output_size, config=config, **arguments)
        self.post_layernorm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)
        # After the adapters, whose hook is in front of it: what is merged is the weight, so the norm sees the sum.
        self.register_forward_hook(normalize_output)


class BiasedRowParallelLinear(RowParallelLinear):
    """Row-parallel linear layer with a bias, for attention: megatron-core's switch for it gives one to every layer."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool, **arguments: Any) -> None:
        super().__init__(input_size, output_size, bias=True, **arguments)


def normalize_output(linear: Any, _: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Normalizes the output of a linear layer; a hook, in front of which adapters can add to it."""
    return linear.post_layernorm(output[0]), output[1]


class JointlyNormedAttention(SelfAttention):
    """Self-attention whose queries are normalized over all heads together, and whose keys are too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        config, group = self.config, self.pg_collection.tp
        assert config.num_query_groups
        # Not by megatron-core's `qk_layernorm`, with which it sums the gradients of these norms over tensor-parallel
        # ranks: the weights of a joint norm are shards.
        self.q_layernorm = JointRMSNorm(config, config.num_attention_heads, self.hidden_size_per_attention_head, group)
        self.k_layernorm = JointRMSNorm(config, config.num_query_groups, self.hidden_size_per_attention_head, group)


class JointRMSNorm(torch.nn.Module):
    """Root-mean-square layer normalization over all heads, computed in float32 and rounded once."""

    def __init__(self, config: TransformerConfig, heads: int, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        options = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(torch.ones(heads // group.size() * width, **options))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        self.eps, self.group = config.layernorm_epsilon, group

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes this rank's heads: (..., heads / tp, width) -> (..., heads / tp, width)."""
        normalized: Tensor = _JointRMSNorm.apply(x.flatten(-2), self.weight, self.eps, self.group)
        return normalized.view(x.shape)


class _JointRMSNorm(torch.autograd.Function):
    """The backward pass needs only the input and one number for each token, which all ranks share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: dist.ProcessGroup) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        dist.all_reduce(squares, group=group)
        width = x.shape[-1] * group.size()
        inverse = squares.div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.group, ctx.width = group, width
        return _scaled(x, weight, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse = ctx.saved_tensors
        projection, weight_grad = _sums(grad, x, weight, inverse)
        # The mean square of a token depends on the heads of all ranks, and the loss depends on it through all of them.
        dist.all_reduce(projection, group=ctx.group)
        return (_input_gradient(grad, x, weight, inverse, projection.div_(ctx.width)), weight_grad, None, None)


@fused
def _scaled(x: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    return (x * inverse).mul_(weight).to(x.dtype)


@fused
def _sums(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the gradient times the normalized input: over this rank's elements of a token, and over all tokens."""
    weighted = (x * inverse).mul_(grad)  # float32, as `inverse`
    return (weighted @ weight.float()).unsqueeze(-1), weighted.flatten(0, -2).sum(0).to(weight.dtype)


@fused
def _input_gradient(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, projection: Tensor) -> Tensor:
    gradient = torch.addcmul(grad.float() * weight, x * inverse, projection, value=-1).mul_(inverse)
    return gradient.to(x.dtype)
