"""Low-rank adapters (LoRA, arXiv:2106.09685) of a model on one rank: where they are, their values, merged weights.

The weights themselves are frozen: no gradients and no optimizer state. `lora_layers` computes with the adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from verl_mg.checkpoint.peft import (
    AdapterShard,
    Shapes,
    adapted_tensors,
    adapter_shapes,
    adapter_shards,
    base_tensor,
    head_shard,
    initial_adapters,
    module_name,
    read_adapters,
    stacked_shards,
)
from verl_mg.config import LoraConfig
from verl_mg.layout import Coordinates
from verl_mg.megatron.lora_layers import Adapter, ExpertAdapter
from verl_mg.models.tensor_index import TensorEntry, TensorInfo
from verl_mg.sharding.boxes import Box, Shard, box_shape, full_box, slices
from verl_mg.sharding.shard_map import ExplicitShardMap, ShardMap
from verl_mg.sharding.weight_table import WeightTable

ADAPTER = "adapter"  # attribute name of the adapters in their layer


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
        expert_group: dist.ProcessGroup | None,
        initialize: bool = True,
    ) -> None:
        self.config = lora
        self.adapted = adapted_tensors(table, lora.targets, lora.experts)
        self.shapes = adapter_shapes(table, self.adapted, lora.rank)
        self.parameters: dict[str, Parameter] = {}
        self.shards: dict[str, Shard] = {}
        self._adapters: list[Adapter | ExpertAdapter] = []
        self._merge: dict[str, Callable[[Tensor], Tensor]] = {}
        self._entries = table.tensor_index.entries
        modules = {prefix + name: module for prefix, chunk in chunks.items() for name, module in chunk.named_modules()}
        # Frozen before the adapters are installed, which stay trainable.
        for chunk in chunks.values():
            _freeze(chunk)
        for name, shard in shards.items():
            if head := head_shard(shard):
                module: Any = modules[name.rpartition(".")[0]]
                self.parameters[name], self.shards[name] = module.weight.requires_grad_(True), head
        for layer in _adapted_layers(shards, self.shapes, self._entries):
            self._install(modules[layer.name], layer, expert_group)
        if initialize:
            self._initialize()

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

    def shard_map(self, weights: ShardMap) -> ExplicitShardMap:
        """Returns the shards of the adapters of every rank, by the names of `parameters` and of PEFT's tensors."""
        shards: dict[int, dict[str, Shard]] = {}
        for rank in weights.ranks:
            layers = _adapted_layers(weights.shards(rank), self.shapes, self._entries)
            shards[rank] = {name: shard for layer in layers for name, shard in layer.adapter_shards().items()}
        infos = {name: TensorInfo(number, shape) for number, (name, shape) in enumerate(self.shapes.items())}
        return ExplicitShardMap(shards, infos)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Returns a block in which the model is the one that the adapters are trained on."""
        for adapter in self._adapters:
            adapter.enabled = False
        try:
            yield
        finally:
            for adapter in self._adapters:
                adapter.enabled = True

    def merge_into(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the parameters with their adapters merged into them, see `ModelRunner.merged_parameters`."""
        return _MergedParameters(parameters, self._merge)

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


class _MergedParameters(Mapping[str, Tensor]):
    """Parameters with their adapters merged into them, each computed on access and not cached."""

    def __init__(self, parameters: Mapping[str, Tensor], merge: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        self._parameters, self._merge = parameters, merge

    def __getitem__(self, name: str) -> Tensor:
        weight = self._parameters[name]
        return self._merge[name](weight) if name in self._merge else weight

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
