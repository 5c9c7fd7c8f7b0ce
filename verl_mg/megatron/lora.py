"""Low-rank adapters (LoRA, arXiv:2106.09685) of a model on one rank: where they are, their values, merged weights.

The weights themselves are frozen: no gradients and no optimizer state. `lora_layers` computes with the adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from verl_mg.checkpoint.peft import (
    AdapterShard,
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
from verl_mg.sharding.boxes import Box, Shard, box_shape, full_box, slices
from verl_mg.sharding.weight_table import WeightTable

ADAPTER = "adapter"
"""Attribute name of the adapters in their layer."""


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
        """Installs the adapters.

        Args:
            table: weight table of the model.
            chunks: this rank's pipeline chunks by the prefix of their parameters' names.
            shards: this rank's shards by the weight table.
            lora: LoRA settings.
            expert_group: ranks with other parts of the same experts; None on a rank without chunks.
            initialize: draw the values of the adapters or read them from `lora.path`; otherwise they are undefined.

        Raises:
            UserError: a target that has no adapters, or a folder with other adapters.
        """
        self.config = lora
        self.adapted = adapted_tensors(table, lora.targets, lora.experts)
        self.shapes = adapter_shapes(table, self.adapted, lora.rank)
        self.parameters: dict[str, Parameter] = {}
        self.shards: dict[str, Shard] = {}
        self._adapters: list[Adapter | ExpertAdapter] = []
        self._merge: dict[str, Callable[[Tensor], Tensor]] = {}
        self._entries = table.tensor_index.entries
        modules = {prefix + name: module for prefix, chunk in chunks.items() for name, module in chunk.named_modules()}
        for chunk in chunks.values():
            _freeze(chunk)
        experts: dict[str, dict[str, list[AdapterShard]]] = {}
        for name, shard in shards.items():
            place = name.rpartition(".")[0]
            module: Any = modules.get(place)
            if local := adapter_shards(shard, self.shapes):
                if self._entries[local[0].tensor].expert is None:
                    self._install(module, place, local)
                else:
                    experts.setdefault(place, {})[name] = local
            elif head := head_shard(shard):
                self.parameters[name], self.shards[name] = module.weight.requires_grad_(True), head
        for place, of_place in experts.items():
            assert expert_group
            self._install_experts(modules[place], place, of_place, expert_group)
        if initialize:
            self._initialize()

    def _install(self, linear: Any, place: str, shards: Sequence[AdapterShard]) -> None:
        adapter = linear.adapter = Adapter(linear, shards, self.config.alpha / self.config.rank)
        if hasattr(linear, "layer_norm_weight"):
            linear.return_layernorm_output = True
        # In front of the norm of Gemma 2, which is a hook too.
        linear.register_forward_hook(_add_adapter, prepend=True)
        self._register(adapter, place, shards)
        self._merge[f"{place}.weight"] = adapter.merged

    def _install_experts(
        self, layer: Any, place: str, shards: Mapping[str, Sequence[AdapterShard]], group: dist.ProcessGroup
    ) -> None:
        """Installs the adapters of all experts of a layer, which has one parameter or one for each expert."""
        weight = next(layer.parameters())
        stacked = stacked_shards([shard for local in shards.values() for shard in local])
        adapter = layer.adapter = ExpertAdapter(weight, stacked, self.config.alpha / self.config.rank, group)
        layer.register_forward_hook(_add_to_experts)
        self._register(adapter, place, stacked)
        for number, name in enumerate(shards):
            self._merge[name] = adapter.merged if len(shards) == 1 else partial(adapter.merged, expert=number)

    def _register(self, adapter: Adapter | ExpertAdapter, place: str, shards: Sequence[AdapterShard]) -> None:
        self._adapters.append(adapter)
        prefix = f"{place}.{ADAPTER}"
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
        """Yields (tensor of PEFT's file, box in it, values) that this rank writes; all ranks write each box once.

        Args:
            at: this rank's coordinates.
        """
        for name, shard in self.shards.items():
            values = self.parameters[name].detach()
            for piece in shard.pieces:
                entry = self._entries.get(base_tensor(piece.tensor))
                of_expert = entry is not None and entry.expert is not None
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
