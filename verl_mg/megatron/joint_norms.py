"""Norms of queries and keys over all heads of a token together (MiniMax-M2), which tensor-parallel ranks divide.

x (..., heads / tp, d) -> sum of squares of these heads (..., 1) -> summed over the ranks -> x / rms * weight
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from verl_mg.megatron.core_version import fused


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
        return _input_gradient(grad, x, weight, inverse, projection.div_(ctx.width)), weight_grad, None, None


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
