"""Low-rank adapters (LoRA, arXiv:2106.09685) of Megatron's linear layers, in the forward pass and merged into weights.

T tokens, rank r; B's rows and A's columns are sharded like the layer:

    column-parallel   (T / tp, in) -> A -> (T / tp, r)   all-gather   -> (T, r) -> rows of B -> (T, out / tp)
    row-parallel      (T, in / tp) -> columns of A -> (T, r)   reduce-scatter   -> (T / tp, r) -> B -> (T / tp, out)

An unsharded factor processes a part of the tokens on each tensor-parallel rank, so its gradient is summed over them
like that of a norm (`sequence_parallel`). A linear layer of Transformer Engine that contains a norm returns the
normalized hidden states too, which are the input of its adapters. The weights themselves are frozen: no gradients and
no optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
"""Attribute name of an `Adapter` in its linear layer."""


class Adapter(Module):
    """Adapters of the tensors of one linear layer, by the last part of their names: `a` (r, in), `b` (out, r)."""

    def __init__(self, linear: Any, shards: Sequence[AdapterShard], scale: float) -> None:
        """Creates uninitialized adapters.

        Args:
            linear: the linear layer of megatron-core or Transformer Engine.
            shards: shards of both factors, one entry for each tensor of the layer.
            scale: factor of the product B A, alpha / r.
        """
        super().__init__()
        self._row_parallel = isinstance(linear, RowParallelLinear) or getattr(linear, "parallel_mode", None) == "row"
        self._sequence_parallel, self._group = linear.sequence_parallel, linear.tp_group
        self._scale, self._height = scale, len(linear.weight)
        self.enabled = True
        """Whether the linear layer adds its adapters."""
        self.a, self.b = ParameterDict(), ParameterDict()
        for shard in shards:
            name = module_name(shard.tensor)
            self.a[name] = self._parameter(linear.weight, shard.a, sharded_dim=1 if self._row_parallel else None)
            self.b[name] = self._parameter(linear.weight, shard.b, sharded_dim=None if self._row_parallel else 0)
            rows = torch.tensor(shard.rows, device=linear.weight.device)
            self.register_buffer(_rows(name), rows, persistent=False)

    def _parameter(self, weight: Tensor, shard: Shard, sharded_dim: int | None) -> Parameter:
        """Creates a parameter that is sharded over tensor-parallel ranks along a dimension, or replicated."""
        parameter = Parameter(weight.new_empty(shard.shape))
        if sharded_dim is None:
            parameter.sequence_parallel = self._sequence_parallel  # type: ignore[attr-defined]
        else:
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=sharded_dim, stride=1)
        return parameter

    def forward(self, hidden: Tensor, output: Tensor) -> Tensor:
        """Adds the adapters to the output of the linear layer.

        Args:
            hidden: (tokens, 1, in), input of the linear layer, after its norm if it contains one.
            output: (tokens, 1, out), its output.

        Returns:
            (tokens, 1, out).
        """
        low_rank = hidden @ torch.cat(list(self.a.values())).T * self._scale
        if self._sequence_parallel:
            exchange = (
                reduce_scatter_to_sequence_parallel_region
                if self._row_parallel
                else gather_from_sequence_parallel_region
            )
            low_rank = exchange(low_rank, group=self._group)
        return output + low_rank @ self._block_b().T

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
            rows = getattr(self, _rows(name))
            base, a = result[rows].float(), self.a[name].float()
            result[rows] = torch.addmm(base, b.float(), a, alpha=self._scale).to(result.dtype)
        return result


def _rows(name: str) -> str:
    return f"rows_{name}"


class Adapters:
    """Adapters of a model on one rank, installed in its chunks; all other weights but a value head are frozen.

    Attributes:
        config: LoRA settings.
        parameters: trained parameters by name.
        shards: for each trained parameter, its boxes of the tensors of PEFT's file.
        shapes: shapes of the tensors of PEFT's file by name.
        adapted: names of the checkpoint's tensors that have an adapter.
    """

    def __init__(
        self,
        table: WeightTable,
        chunks: Mapping[str, Module],
        shards: Mapping[str, Shard],
        lora: LoraConfig,
        initialize: bool = True,
    ) -> None:
        """Installs the adapters.

        Args:
            table: weight table of the model.
            chunks: this rank's pipeline chunks by the prefix of their parameters' names.
            shards: this rank's shards by the weight table.
            lora: LoRA settings.
            initialize: draw the values of the adapters or read them from `lora.path`; otherwise they are undefined.

        Raises:
            UserError: a target that has no adapters, or a folder with other adapters.
        """
        self.config = lora
        self.adapted = adapted_tensors(table, lora.targets)
        self.shapes = adapter_shapes(table, self.adapted, lora.rank)
        self.parameters: dict[str, Parameter] = {}
        self.shards: dict[str, Shard] = {}
        self._adapters: dict[str, Adapter] = {}
        modules = {prefix + name: module for prefix, chunk in chunks.items() for name, module in chunk.named_modules()}
        for chunk in chunks.values():
            _freeze(chunk)
        for name, shard in shards.items():
            module: Any = modules.get(name.removesuffix(".weight"))
            if local := adapter_shards(shard, self.adapted, lora.rank):
                self._install(module, name, local)
            elif head := head_shard(shard):
                self.parameters[name], self.shards[name] = module.weight.requires_grad_(True), head
        if initialize:
            self._initialize()

    def _install(self, linear: Any, name: str, shards: Sequence[AdapterShard]) -> None:
        adapter = linear.adapter = self._adapters[name] = Adapter(linear, shards, self.config.alpha / self.config.rank)
        if hasattr(linear, "layer_norm_weight"):
            linear.return_layernorm_output = True
        linear.register_forward_hook(_add_adapter)
        prefix = f"{name.removesuffix('.weight')}.{ADAPTER}"
        for shard in shards:
            tensor = module_name(shard.tensor)
            self.parameters |= {f"{prefix}.a.{tensor}": adapter.a[tensor], f"{prefix}.b.{tensor}": adapter.b[tensor]}
            self.shards |= {f"{prefix}.a.{tensor}": shard.a, f"{prefix}.b.{tensor}": shard.b}

    def _initialize(self) -> None:
        is_fresh = self.config.path is None
        read = (
            initial_adapters(self.shapes, self.config.seed)
            if self.config.path is None
            else read_adapters(self.config.path, self.shapes, self.config)
        )
        for name, shard in self.shards.items():
            if is_fresh and ADAPTER not in name.split("."):
                continue  # a head is loaded with the model
            for piece in shard.pieces:
                self.parameters[name].detach()[slices(piece.target)] = read(piece.tensor, piece.source)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Returns a block in which the model is the one that the adapters are trained on."""
        for adapter in self._adapters.values():
            adapter.enabled = False
        try:
            yield
        finally:
            for adapter in self._adapters.values():
                adapter.enabled = True

    def merge_into(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the parameters with their adapters merged into them, see `ModelRunner.merged_parameters`."""
        return _MergedParameters(parameters, self._adapters)

    @property
    def adapted_parameters(self) -> frozenset[str]:
        """Names of the parameters of the weight table that have adapters on this rank."""
        return frozenset(self._adapters)

    def local_boxes(self, at: Coordinates) -> Iterator[tuple[str, Box, Tensor]]:
        """Yields (tensor of PEFT's file, box in it, values) that this rank writes; all ranks write each box once.

        Args:
            at: this rank's coordinates.
        """
        if at.dp or at.cp:
            return
        for name, shard in self.shards.items():
            values = self.parameters[name].detach()
            for piece in shard.pieces:
                if at.tp == 0 or piece.source != full_box(self.shapes[piece.tensor]):
                    yield piece.tensor, piece.source, values[slices(piece.target)]


class _MergedParameters(Mapping[str, Tensor]):
    """Parameters with their adapters merged into them, each computed on access and not cached."""

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
        # A layer is recomputed in the backward pass only where its input requires a gradient.
        chunk.embedding.register_forward_hook(_require_gradient)


def _add_adapter(linear: Any, inputs: tuple[Tensor], output: tuple[Any, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    base, bias = output
    base, hidden = base if isinstance(base, tuple) else (base, inputs[0])
    return linear.adapter(hidden, base) if linear.adapter.enabled else base, bias


def _require_gradient(_: Module, inputs: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
