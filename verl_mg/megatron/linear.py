"""The linear layer that Gemma 2 has and megatron-core has not: one with a norm behind it."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor

from verl_mg.megatron.norm import RMSNorm


class NormedRowParallelLinear(RowParallelLinear):
    """A row-parallel linear layer whose output is normalised, named as Megatron-Bridge names it."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **arguments: Any) -> None:
        super().__init__(input_size, output_size, config=config, **arguments)
        self.post_layernorm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """(T, 1, input_size / tp) -> (T or T / tp, 1, output_size), whole rows, and the bias that is not yet added."""
        output, bias = super().forward(input_)
        return self.post_layernorm(output), bias
