"""Layers that megatron-core's local specification does not provide: RMSNorm and a linear layer followed by one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square layer normalization (arXiv:1910.07467), computed in float32.

    With `layernorm_zero_centered_gamma` it multiplies by 1 + its weight, in float32 too, as Gemma does.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        """Creates a norm with unit weights.

        Args:
            config: megatron-core's configuration.
            hidden_size: width of the normalized axis.
            eps: added to the mean square.
        """
        super().__init__()
        options = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **options))
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        # Each tensor-parallel rank sees only its tokens: megatron-core sums such gradients over the group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last axis: (..., hidden_size) -> (..., hidden_size)."""
        normalized = F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        if self.zero_centered:
            return (normalized * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * normalized.to(x.dtype)


class NormedRowParallelLinear(RowParallelLinear):
    """Row-parallel linear layer whose output is normalized, as in Gemma 2; named as Megatron-Bridge names it."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **arguments: Any) -> None:
        """Creates the layer.

        Args:
            input_size: width of the input over all tensor-parallel ranks.
            output_size: width of the output.
            config: megatron-core's configuration.
            arguments: further arguments of `RowParallelLinear`.
        """
        super().__init__(input_size, output_size, config=config, **arguments)
        self.post_layernorm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Projects (T, 1, input_size / tp) to (T or T / tp, 1, output_size), and returns the bias not yet added."""
        output, bias = super().forward(input_)
        return self.post_layernorm(output), bias
