"""Low-rank adapters (LoRA, arXiv:2106.09685) of a Megatron model on one rank.

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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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

from verl_mg.checkpoint.peft import (
    AdapterShard,
    Shapes,
    adapter_shards,
    base_tensor,
    head_shard,
    module_name,
    stacked_shards,
)
from verl_mg.config import LoraConfig
from verl_mg.layout import Coordinates
from verl_mg.megatron.experts import grouped_product
from verl_mg.models.tensor_index import TensorEntry
from verl_mg.sharding.boxes import Box, Shard, box_shape, full_box, slices
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.weight_table import WeightTable
from verl_mg.training.lora import ADAPTER, Adapters
from verl_mg.training.runner import ComputedParameters


@dataclass(frozen=True)
class _AdaptedLayer:
    name: str
    parameters: tuple[str, ...]  # parameters of the module by the weight table that have adapters
    shards: tuple[AdapterShard, ...]  # shards of the adapters, stacked in a layer of experts
    of_experts: bool  # whether it contains the linear layers of experts

    def names(self, tensor: str) -> tuple[str, str]:
        """Returns the names of the parameters A and B of a tensor, by the last part of its name."""
        return f"{self.name}.{ADAPTER}.a.{tensor}", f"{self.name}.{ADAPTER}.b.{tensor}"

    def adapter_shards(self) -> dict[str, Shard]:
        """Returns the shards by the names of the parameters A and B."""
        named = [(self.names(module_name(shard.tensor)), shard) for shard in self.shards]
        return {name: of for names, shard in named for name, of in zip(names, (shard.a, shard.b), strict=True)}


def _adapted_layers(
    shards: Mapping[str, Shard], shapes: Shapes, entries: Mapping[str, TensorEntry]
) -> list[_AdaptedLayer]:
    by_layer: dict[str, dict[str, list[AdapterShard]]] = {}
    for name, shard in shards.items():
        if local := adapter_shards(shard, shapes):
            by_layer.setdefault(name.rpartition(".")[0], {})[name] = local
    layers = []
    for layer, parameters in by_layer.items():
        of_layer = [shard for local in parameters.values() for shard in local]
        of_experts = entries[of_layer[0].tensor].expert is not None
        stacked = stacked_shards(of_layer) if of_experts else of_layer
        layers.append(_AdaptedLayer(layer, tuple(parameters), tuple(stacked), of_experts))
    return layers


class MegatronAdapters(Adapters):
    """Adapters of this rank's chunks, by the names of their parameters in the weight table."""

    def __init__(
        self,
        table: WeightTable,
        chunks: Mapping[str, Module],
        shards: Mapping[str, Shard],
        lora: LoraConfig,
        expert_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(table, lora)
        self._adapters: list[Adapter | ExpertAdapter] = []
        self._merge: dict[str, Callable[[Tensor], Tensor]] = {}
        self._entries = table.tensor_index.entries
        modules = {prefix + name: module for prefix, chunk in chunks.items() for name, module in chunk.named_modules()}
        # Frozen before the adapters are installed, which stay trainable.
        chunk: Any
        for chunk in chunks.values():
            chunk.requires_grad_(False)
            if chunk.pre_process and chunk.config.recompute_granularity is not None:
                # A layer is recomputed in the backward pass only where its input requires a gradient.
                chunk.embedding.register_forward_hook(_require_gradient)
        for name, shard in shards.items():
            if head := head_shard(shard):
                module: Any = modules[name.rpartition(".")[0]]
                self.parameters[name], self.shards[name] = module.weight.requires_grad_(True), head
        for layer in _adapted_layers(shards, self.shapes, self._entries):
            self._install(modules[layer.name], layer, expert_group)

    def _install(self, module: Any, layer: _AdaptedLayer, expert_group: dist.ProcessGroup | None) -> None:
        scale = self.config.alpha / self.config.rank
        adapter: Adapter | ExpertAdapter
        if layer.of_experts:
            assert expert_group
            adapter = ExpertAdapter(next(module.parameters()), layer.shards, scale, expert_group)
            module.register_forward_hook(_add_to_experts)
            stacked = len(layer.parameters) == 1
            for number, name in enumerate(layer.parameters):
                self._merge[name] = adapter.merged if stacked else partial(adapter.merged, expert=number)
        else:
            adapter = Adapter(module, layer.shards, scale)
            # In front of the norm of Gemma 2, which is a hook too.
            module.register_forward_hook(_add_adapter, prepend=True)
            # Transformer Engine's layer contains the norm: its adapters need the normalized input.
            if hasattr(module, "layer_norm_weight"):
                module.return_layernorm_output = True
            self._merge[f"{layer.name}.weight"] = adapter.merged
        module.adapter = adapter
        self._adapters.append(adapter)
        self.shards |= layer.adapter_shards()
        for shard in layer.shards:
            tensor = module_name(shard.tensor)
            name_a, name_b = layer.names(tensor)
            self.parameters |= {name_a: adapter.a[tensor], name_b: adapter.b[tensor]}

    def _layers(self) -> Iterable[Adapter | ExpertAdapter]:
        return self._adapters

    def _shards_of(self, rank: int, weights: ShardMap) -> dict[str, Shard]:
        layers = _adapted_layers(weights.shards(rank), self.shapes, self._entries)
        return {name: shard for layer in layers for name, shard in layer.adapter_shards().items()}

    def merge_into(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the parameters with their adapters merged into them, each computed on access."""

        def merged(name: str, weight: Tensor) -> Tensor:
            return self._merge[name](weight) if name in self._merge else weight

        return ComputedParameters(parameters, merged)

    @property
    def adapted_parameters(self) -> frozenset[str]:
        """Names of the parameters of the weight table that have adapters on this rank."""
        return frozenset(self._merge)

    def local_boxes(self, at: Coordinates) -> Iterator[tuple[str, Box, Tensor]]:
        """Yields (tensor of PEFT's file, box in it, values) that this rank writes; all ranks write each box once."""
        for name, shard in self.shards.items():
            values = self.parameters[name].detach()
            for piece in shard.pieces:
                entry = self._entries.get(base_tensor(piece.tensor))
                of_expert = entry is not None and entry.expert is not None
                # Of the ranks with the same box one writes: the first replica, and of tensor-parallel ranks that have
                # the whole factor the first.
                replica, part = (at.edp, at.etp) if of_expert else (at.dp or at.cp, at.tp)
                if not replica and (part == 0 or piece.source != full_box(self.shapes[piece.tensor])):
                    yield piece.tensor, piece.source, values[slices(piece.target)].view(box_shape(piece.source))


def _add_adapter(linear: Any, inputs: tuple[Tensor], output: tuple[Any, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    base, bias = output
    base, hidden = base if isinstance(base, tuple) else (base, inputs[0])
    return linear.adapter(hidden, base) if linear.adapter.enabled else base, bias


def _add_to_experts(layer: Any, inputs: tuple[Tensor, Any], output: Any) -> Any:
    """Adds the adapters of experts; Transformer Engine has the lengths of the experts' tokens, and returns a bias."""
    if not layer.adapter.enabled:
        return output
    tokens, ends = inputs
    if isinstance(output, Tensor):
        return layer.adapter(tokens, ends, output)
    ends = torch.as_tensor(ends, device=tokens.device).cumsum(0, dtype=torch.int32)
    return layer.adapter(tokens, ends, output[0]), output[1]


def _require_gradient(_: Module, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


class _Factors(Module):
    """A and B of the tensors of a layer, by the last part of their names: `a` (..., r, in), `b` (..., out, r)."""

    def __init__(self, weight: Tensor, shards: Sequence[AdapterShard], scale: float) -> None:
        super().__init__()
        self._splits_a = any(shard.splits_a for shard in shards)
        self._splits_b = any(shard.splits_b for shard in shards)
        self._scale, self._height = scale, weight.shape[-2]
        self.enabled = True  # whether the layer adds its adapters
        self.a, self.b = ParameterDict(), ParameterDict()
        for shard in shards:
            name = module_name(shard.tensor)
            self.a[name], self.b[name] = (Parameter(weight.new_empty(factor.shape)) for factor in (shard.a, shard.b))
            self.register_buffer(_rows(name), torch.tensor(shard.rows, device=weight.device), persistent=False)

    def _kinds(self) -> Iterator[tuple[Any, int, bool]]:
        """Yields each factor with the dimension that ranks divide, and whether they do."""
        yield from ((factor, factor.dim() - 1, self._splits_a) for factor in self.a.values())
        yield from ((factor, factor.dim() - 2, self._splits_b) for factor in self.b.values())

    def _joined(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Returns all A, and all B as one matrix (..., rows of the layer, r * tensors): one product applies them.

        `group`: ranks over which the gradient of an unsharded factor is summed, since it sees only a part of the other.
        """
        a, blocks = torch.cat(list(self.a.values()), dim=-2), []
        for name, b in self.b.items():
            empty = b.new_zeros(*b.shape[:-2], self._height, b.shape[-1])
            blocks.append(empty.index_copy(b.dim() - 2, getattr(self, _rows(name)), b))
        b = torch.cat(blocks, dim=-1)
        if group is not None:
            a = a if self._splits_a else copy_to_tensor_model_parallel_region(a, group=group)
            b = b if self._splits_b else copy_to_tensor_model_parallel_region(b, group=group)
        return a, b

    @torch.no_grad()
    def merged(self, weight: Tensor, expert: int | None = None) -> Tensor:
        """Returns a copy of a matrix, or of a stack of them, plus the adapters: float32 sums, rounded to its dtype."""
        result = weight.detach().clone()
        for number, matrix in [(expert, result)] if result.dim() == 2 else enumerate(result):
            for name, b in self.b.items():
                a, rows = self.a[name], getattr(self, _rows(name))
                a, b = (a, b) if number is None else (a[number], b[number])
                product = torch.addmm(matrix[rows].float(), b.float(), a.float(), alpha=self._scale)
                matrix[rows] = product.to(matrix.dtype)
        return result


class Adapter(_Factors):
    """Adapters of the tensors of one linear layer: `a` (r, in), `b` (out, r)."""

    def __init__(self, linear: Any, shards: Sequence[AdapterShard], scale: float) -> None:
        super().__init__(linear.weight, shards, scale)
        shares_tokens = linear.config.sequence_parallel
        self._group = linear.tp_group if self._splits_a or self._splits_b else None
        self._exchanges = shares_tokens and self._group is not None and not _leaves_communication(linear)
        self._sums_gradients = self._group is not None and not self._exchanges
        for factor, dim, splits in self._kinds():
            if splits:
                set_tensor_model_parallel_attributes(factor, is_parallel=True, dim=dim, stride=1)
            elif not self._sums_gradients:
                # megatron-core sums such gradients over the tensor-parallel ranks, as of norms.
                factor.sequence_parallel = shares_tokens

    def forward(self, hidden: Tensor, output: Tensor) -> Tensor:
        """Adds the adapters' product with the layer's input (tokens, 1, in), after a norm in it, to its output."""
        a, b = self._joined(self._group if self._sums_gradients else None)
        low_rank = hidden @ a.T * self._scale
        # The narrow product travels, r numbers a token, and not the input or the output of the layer.
        if self._exchanges:
            exchange = (
                reduce_scatter_to_sequence_parallel_region if self._splits_a else gather_from_sequence_parallel_region
            )
            low_rank = exchange(low_rank, group=self._group)
        return output + low_rank @ b.T


class ExpertAdapter(_Factors):
    """Adapters of a rank's experts: `a` (experts, r, in), `b` (experts, out, r)."""

    def __init__(self, weight: Tensor, shards: Sequence[AdapterShard], scale: float, group: dist.ProcessGroup) -> None:
        super().__init__(weight, shards, scale)
        self._group = group
        for factor, dim, splits in self._kinds():
            # A factor that several ranks have is counted once in the norm of the gradient.
            if splits or group.rank() == 0:
                set_tensor_model_parallel_attributes(factor, is_parallel=True, dim=dim, stride=1)
            factor.allreduce = False  # summed over the expert-data-parallel ranks

    def forward(self, tokens: Tensor, ends: Tensor, output: Tensor) -> Tensor:
        """Adds the adapters' products with tokens (n, in), sorted by expert, to the output (n, out) of the layer.

        `ends` (experts,) int32: where the tokens of each expert end.
        """
        a, b = self._joined(self._group if self._group.size() > 1 else None)
        low_rank = grouped_product(tokens, a, ends) * self._scale
        return output + grouped_product(low_rank, b, ends)


def _leaves_communication(linear: Any) -> bool:
    """Returns whether others exchange the tokens of a sharded layer, as with `moe_shared_expert_overlap`."""
    return getattr(linear, "parallel_mode", "") is None or getattr(linear, "explicit_expert_comm", False)


def _rows(name: str) -> str:
    return f"rows_{name}"
