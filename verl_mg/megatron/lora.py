"""Low-rank adapters in Megatron's linear layers: their way through the forward pass, and merged into the weights.

Of T tokens, with r numbers a token between the two factors; B's rows and A's columns are those of the layer's shard:

    column-parallel   (T / tp, in) -> A -> (T / tp, r)   gathered over tokens   -> (T, r) -> rows of B -> (T, out / tp)
    row-parallel      (T, in / tp) -> columns of A -> (T, r)   summed and dealt   -> (T / tp, r) -> B -> (T / tp, out)

A whole factor sees a part of the tokens on each tensor-parallel rank, so its gradient is summed over them like a norm's
(`sequence_parallel`). The weights themselves are frozen: they have no gradients and no optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor
from torch.nn import Module, Parameter, ParameterDict

from verl_mg.checkpoint.peft import (
    AdapterShard,
    adapted_tensors,
    adapter_shapes,
    adapter_shards,
    head_shard,
    initial_adapters,
    module_name,
    read_adapters,
)
from verl_mg.config import LoraConfig
from verl_mg.layout import Coordinates
from verl_mg.sharding.boxes import Box, Shard, full_box, slices
from verl_mg.sharding.weight_table import WeightTable

ADAPTER = "adapter"
"""The name of an `Adapter` in its linear layer."""


class Adapter(Module):
    """The adapters of all tensors of one linear layer, by the last parts of their names: `a` (r, in), `b` (out, r)."""

    def __init__(self, linear: Any, shards: Sequence[AdapterShard], scale: float) -> None:
        super().__init__()
        self._row_parallel = isinstance(linear, RowParallelLinear)
        self._sequence_parallel, self._group = linear.sequence_parallel, linear.tp_group
        self._scale, self._height = scale, len(linear.weight)
        self.a, self.b = ParameterDict(), ParameterDict()
        for shard in shards:
            name = module_name(shard.tensor)
            self.a[name] = self._parameter(linear.weight, shard.a, cut=1 if self._row_parallel else None)
            self.b[name] = self._parameter(linear.weight, shard.b, cut=None if self._row_parallel else 0)
            rows = torch.tensor(shard.rows, device=linear.weight.device)
            self.register_buffer(_rows(name), rows, persistent=False)

    def _parameter(self, weight: Tensor, shard: Shard, cut: int | None) -> Parameter:
        """cut: along which dimension tensor-parallel ranks have parts."""
        parameter = Parameter(weight.new_empty(shard.shape))
        if cut is None:
            parameter.sequence_parallel = self._sequence_parallel  # type: ignore[attr-defined]
        else:
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=cut, stride=1)
        return parameter

    def forward(self, hidden: Tensor, output: Tensor) -> Tensor:
        """What goes into the linear layer and what comes out of it, (tokens, 1, width) -> the latter, adapted."""
        low = hidden @ torch.cat(list(self.a.values())).T * self._scale
        if self._sequence_parallel:
            exchange = (
                reduce_scatter_to_sequence_parallel_region
                if self._row_parallel
                else gather_from_sequence_parallel_region
            )
            low = exchange(low, group=self._group)
        return output + low @ self._up().T

    def _up(self) -> Tensor:
        """(rows of the layer, r * tensors): each tensor's B in its own rows and columns, so that one product does."""
        blocks = []
        for name, b in self.b.items():
            blocks.append(b.new_zeros(self._height, b.shape[1]).index_copy(0, getattr(self, _rows(name)), b))
        return torch.cat(blocks, dim=1)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """A copy of the layer's weight with the adapters in it, summed in fp32 and rounded to its dtype."""
        whole = weight.detach().clone()
        for name, b in self.b.items():
            rows = getattr(self, _rows(name))
            own, a = whole[rows].float(), self.a[name].float()
            whole[rows] = torch.addmm(own, b.float(), a, alpha=self._scale).to(whole.dtype)
        return whole


def _rows(name: str) -> str:
    return f"rows_{name}"


class Adapters:
    """The adapters of a network on one rank, put into its model chunks; all else there is frozen, but a value head.

    chunks: {beginning of the names of a chunk's parameters: chunk}. shards: the rank's, by the weight table.
    parameters: what is trained, by name. shards: what of which tensor of PEFT's file each of them holds.
    shapes: the tensors of that file. adapted: the tensors of the checkpoint with an adapter.
    """

    def __init__(
        self, table: WeightTable, chunks: Mapping[str, Module], shards: Mapping[str, Shard], lora: LoraConfig
    ) -> None:
        self.config = lora
        self.adapted = adapted_tensors(table, lora.targets)
        self.shapes = adapter_shapes(table, self.adapted, lora.rank)
        self.parameters: dict[str, Parameter] = {}
        self.shards: dict[str, Shard] = {}
        self._of: dict[str, Adapter] = {}
        modules = {begin + name: module for begin, chunk in chunks.items() for name, module in chunk.named_modules()}
        for chunk in chunks.values():
            _freeze(chunk)
        for name, shard in shards.items():
            module: Any = modules.get(name.removesuffix(".weight"))
            if own := adapter_shards(shard, self.adapted, lora.rank):
                self._put_into(module, name, own)
            elif head := head_shard(shard):
                self.parameters[name], self.shards[name] = module.weight.requires_grad_(True), head
        self._fill()

    def _put_into(self, linear: Any, name: str, shards: Sequence[AdapterShard]) -> None:
        adapter = linear.adapter = self._of[name] = Adapter(linear, shards, self.config.alpha / self.config.rank)
        linear.register_forward_hook(_adapted)
        begin = f"{name.removesuffix('.weight')}.{ADAPTER}"
        for shard in shards:
            of = module_name(shard.tensor)
            self.parameters |= {f"{begin}.a.{of}": adapter.a[of], f"{begin}.b.{of}": adapter.b[of]}
            self.shards |= {f"{begin}.a.{of}": shard.a, f"{begin}.b.{of}": shard.b}

    def _fill(self) -> None:
        fresh = self.config.path is None
        read = (
            initial_adapters(self.shapes, self.config.seed)
            if self.config.path is None
            else read_adapters(self.config.path, self.shapes, self.config)
        )
        for name, shard in self.shards.items():
            if fresh and ADAPTER not in name.split("."):
                continue  # a head comes with the model
            for piece in shard.pieces:
                self.parameters[name].detach()[slices(piece.target)] = read(piece.tensor, piece.source)

    def served(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `Network.served_parameters`."""
        return _Served(parameters, self._of)

    @property
    def of(self) -> frozenset[str]:
        """The parameters of the weight table that have adapters on this rank."""
        return frozenset(self._of)

    def own(self, at: Coordinates) -> Iterator[tuple[str, Box, Tensor]]:
        """(tensor of PEFT's file, box in it, values) that this rank writes: of all ranks together each box once."""
        if at.dp or at.cp:
            return
        for name, shard in self.shards.items():
            values = self.parameters[name].detach()
            for piece in shard.pieces:
                if at.tp == 0 or piece.source != full_box(self.shapes[piece.tensor]):
                    yield piece.tensor, piece.source, values[slices(piece.target)]


class _Served(Mapping[str, Tensor]):
    """Parameters with their adapters merged into them, each made when it is asked for and kept by nobody."""

    def __init__(self, parameters: Mapping[str, Tensor], adapters: Mapping[str, Adapter]) -> None:
        self._parameters, self._adapters = parameters, adapters

    def __getitem__(self, name: str) -> Tensor:
        weight = self._parameters[name]
        return self._adapters[name].merged(weight) if name in self._adapters else weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _freeze(chunk: Any) -> None:
    chunk.requires_grad_(False)
    if chunk.pre_process and chunk.config.recompute_granularity is not None:
        # A layer is recomputed in the backward pass only where a gradient of what went into it is asked for.
        chunk.embedding.register_forward_hook(_with_gradient)


def _adapted(linear: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    own, bias = output
    return linear.adapter(inputs[0], own), bias


def _with_gradient(_: Module, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
