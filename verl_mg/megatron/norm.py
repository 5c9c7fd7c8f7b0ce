"""RMSNorm that tells megatron-core how its weight's gradient is to be summed under sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square layer normalisation (arXiv:1910.07467), computed in fp32.

    With `layernorm_zero_centered_gamma` it multiplies by 1 + its weight, in fp32 too, as Gemma does.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        place = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **place))
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        # Each tensor-parallel rank sees only its tokens: megatron-core sums such gradients over the group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) -> the same."""
        normalized = F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        if self.zero_centered:
            return (normalized * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * normalized.to(x.dtype)
