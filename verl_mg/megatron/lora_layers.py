"""Low-rank adapters (LoRA, arXiv:2106.09685) of one layer: in its forward pass, and merged into its weights.

T tokens, rank r; B's rows and A's columns are sharded like the layer:

    column-parallel   (T / tp, in) -> A -> (T / tp, r)   all-gather   -> (T, r) -> rows of B -> (T, out / tp)
    row-parallel      (T, in / tp) -> columns of A -> (T, r)   reduce-scatter   -> (T / tp, r) -> B -> (T / tp, out)
    replicated        (T / tp, in) -> A -> (T / tp, r) -> B -> (T / tp, out)
    experts           (n, in) or (n, in / etp) -> A of the token's expert -> (n, r) -> B of the expert -> (n, out)

An unsharded factor processes a part of the tokens on each tensor-parallel rank, so its gradient is summed over them
like that of a norm (`sequence_parallel`). Experts, and shared experts that compute while tokens are dispatched, get
all tokens, and return parts of sums that the dispatcher adds up. There each rank adds its part of the low-rank product,
and the backward pass sums the gradient of the unsharded factor. A linear layer of Transformer Engine that contains a
norm returns the normalized hidden states too, which are the input of its adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor
from torch.nn import Module, Parameter, ParameterDict

from verl_mg.checkpoint.peft import AdapterShard, module_name
from verl_mg.megatron.experts import grouped_product
from verl_mg.sharding.boxes import Shard


class Adapter(Module):
    """Adapters of the tensors of one linear layer, by the last part of their names: `a` (r, in), `b` (out, r)."""

    def __init__(self, linear: Any, shards: Sequence[AdapterShard], scale: float) -> None:
        super().__init__()
        shares_tokens = linear.config.sequence_parallel
        self._splits_a = any(shard.splits_a for shard in shards)
        self._splits_b = any(shard.splits_b for shard in shards)
        self._group = linear.tp_group if self._splits_a or self._splits_b else None
        self._exchanges = shares_tokens and self._group is not None and not _leaves_communication(linear)
        self._sums_gradients = self._group is not None and not self._exchanges
        self._scale, self._height = scale, len(linear.weight)
        self.enabled = True  # whether the linear layer adds its adapters
        self.a, self.b = ParameterDict(), ParameterDict()
        for shard in shards:
            name = module_name(shard.tensor)
            for factors, of_factor, dim, splits in (
                (self.a, shard.a, 1, self._splits_a),
                (self.b, shard.b, 0, self._splits_b),
            ):
                factors[name] = _parameter(linear.weight, of_factor, dim if splits else None)
                if not splits and not self._sums_gradients:
                    # megatron-core sums such gradients over the tensor-parallel ranks, as of norms.
                    factors[name].sequence_parallel = shares_tokens
            self.register_buffer(_rows(name), _index(shard, linear.weight), persistent=False)

    def forward(self, hidden: Tensor, output: Tensor) -> Tensor:
        """Adds the adapters' product with the layer's input (tokens, 1, in), after a norm in it, to its output."""
        a, b = torch.cat(list(self.a.values())), self._block_b()
        if self._sums_gradients:
            # The factor that every rank has sees only this rank's part of the other one.
            a = a if self._splits_a else copy_to_tensor_model_parallel_region(a, group=self._group)
            b = b if self._splits_b else copy_to_tensor_model_parallel_region(b, group=self._group)
        low_rank = hidden @ a.T * self._scale
        # The narrow product travels, r numbers a token, and not the input or the output of the layer.
        if self._exchanges:
            exchange = (
                reduce_scatter_to_sequence_parallel_region if self._splits_a else gather_from_sequence_parallel_region
            )
            low_rank = exchange(low_rank, group=self._group)
        return output + low_rank @ b.T

    def _block_b(self) -> Tensor:
        """Arranges all B in one matrix (rows of the layer, r * tensors), so that one product applies them."""
        blocks = []
        for name, b in self.b.items():
            blocks.append(b.new_zeros(self._height, b.shape[1]).index_copy(0, getattr(self, _rows(name)), b))
        return torch.cat(blocks, dim=1)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Returns a copy of the layer's weight plus the adapters, summed in float32 and rounded to its dtype."""
        result = weight.detach().clone()
        for name, b in self.b.items():
            _add_product(result, getattr(self, _rows(name)), self.a[name], b, self._scale)
        return result


class ExpertAdapter(Module):
    """Adapters of a rank's experts, by the last part of their names: `a` (experts, r, in), `b` (experts, out, r)."""

    def __init__(self, weight: Tensor, shards: Sequence[AdapterShard], scale: float, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._scale, self._height, self._group = scale, weight.shape[-2], group
        self._splits_a = any(shard.splits_a for shard in shards)
        self._splits_b = any(shard.splits_b for shard in shards)
        self.enabled = True  # whether the layer adds its adapters
        self.a, self.b = ParameterDict(), ParameterDict()
        for shard in shards:
            name = module_name(shard.tensor)
            for factors, of_factor, dim, splits in (
                (self.a, shard.a, 2, self._splits_a),
                (self.b, shard.b, 1, self._splits_b),
            ):
                # A factor that several ranks have is counted once in the norm of the gradient.
                counted = splits or group.rank() == 0
                factors[name] = _parameter(weight, of_factor, dim if counted else None)
                factors[name].allreduce = False  # summed over the expert-data-parallel ranks
            self.register_buffer(_rows(name), _index(shard, weight), persistent=False)

    def forward(self, tokens: Tensor, ends: Tensor, output: Tensor) -> Tensor:
        """Adds the adapters' products with tokens (n, in), sorted by expert, to the output (n, out) of the layer.

        `ends` (experts,) int32: where the tokens of each expert end.
        """
        a, b = torch.cat(list(self.a.values()), dim=1), self._block_b()
        if self._group.size() > 1:
            a = a if self._splits_a else copy_to_tensor_model_parallel_region(a, group=self._group)
            b = b if self._splits_b else copy_to_tensor_model_parallel_region(b, group=self._group)
        low_rank = grouped_product(tokens, a, ends) * self._scale
        return output + grouped_product(low_rank, b, ends)

    def _block_b(self) -> Tensor:
        """Arranges all B of each expert in one matrix: (experts, rows of the layer, r * kinds)."""
        blocks = []
        for name, b in self.b.items():
            empty = b.new_zeros(len(b), self._height, b.shape[2])
            blocks.append(empty.index_copy(1, getattr(self, _rows(name)), b))
        return torch.cat(blocks, dim=2)

    @torch.no_grad()
    def merged(self, weight: Tensor, expert: int | None = None) -> Tensor:
        """Returns a copy of weights plus the adapters, summed in float32 and rounded to their dtype."""
        result = weight.detach().clone()
        matrices = [(expert, result)] if expert is not None else list(enumerate(result))
        for number, matrix in matrices:
            for name, b in self.b.items():
                _add_product(matrix, getattr(self, _rows(name)), self.a[name][number], b[number], self._scale)
        return result


def _parameter(weight: Tensor, shard: Shard, dim: int | None) -> Any:
    parameter = Parameter(weight.new_empty(shard.shape))
    if dim is not None:
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)
    return parameter


def _add_product(matrix: Tensor, rows: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    matrix[rows] = torch.addmm(matrix[rows].float(), b.float(), a.float(), alpha=scale).to(matrix.dtype)


def _leaves_communication(linear: Any) -> bool:
    """Returns whether others exchange the tokens of a sharded layer, as with `moe_shared_expert_overlap`."""
    return getattr(linear, "parallel_mode", "") is None or getattr(linear, "explicit_expert_comm", False)


def _rows(name: str) -> str:
    return f"rows_{name}"


def _index(shard: AdapterShard, weight: Tensor) -> Tensor:
    return torch.tensor(shard.rows, device=weight.device)
