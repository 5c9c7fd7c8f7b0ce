"""Low-rank adapters (LoRA, arXiv:2106.09685) of a module of `transformers`, which every rank has whole.

Adapters are small, 0.1 to 0.5 % of a model: they are not sharded, and their gradients are summed over the ranks once
for each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl_mg import device
from verl_mg.checkpoint.peft import adapter_shards, head_shard
from verl_mg.config import LoraConfig
from verl_mg.errors import UserError
from verl_mg.models.hf_config import other_choice
from verl_mg.sharding.boxes import Box, Shard, slices
from verl_mg.sharding.module_table import ModuleTable
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.training.lora import ADAPTER, Adapters


class Adapter(nn.Module):
    """A and B of each tensor of a linear layer; the layer's output becomes x W + scale * (x A) B."""

    def __init__(self, shapes: list[tuple[tuple[int, ...], tuple[int, ...]]], scale: float) -> None:
        super().__init__()
        place = device.current_device()
        self.a = nn.ParameterList(torch.empty(a, device=place) for a, _ in shapes)
        self.b = nn.ParameterList(torch.empty(b, device=place) for _, b in shapes)
        self.scale, self.enabled = scale, True

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns what is added to the layer's output: (..., in) -> (..., out)."""
        # Adapters are float32, and compute in the dtype of the layer.
        pairs = zip(self.a, self.b, strict=True)
        parts = [F.linear(F.linear(inputs, a.to(inputs.dtype)), b.to(inputs.dtype)) for a, b in pairs]
        return self.scale * torch.cat(parts, dim=-1)

    def product(self, rows: slice) -> Tensor:
        """Returns the float32 rows of scale * B A that belong to rows of the layer's weight."""
        products = [b.detach() @ a.detach() for a, b in zip(self.a, self.b, strict=True)]
        return self.scale * torch.cat(products)[rows]


class FsdpAdapters(Adapters):
    """Adapters of a module of `transformers`."""

    def __init__(
        self, table: ModuleTable, module: Any, whole: Mapping[str, Shard], lora: LoraConfig, trains: bool
    ) -> None:
        self._other = other_choice(table.model_dir)
        if lora.experts:
            raise UserError(f"lora.experts: not with backend: fsdp. Write lora.experts=false. {self._other}")
        super().__init__(table, lora)
        self._by_weight: dict[str, Adapter] = {}
        modules = dict(module.named_modules())
        # Everything but the adapters and a head, which are created below.
        module.requires_grad_(False)
        module.enable_input_require_grads()  # a layer is recomputed only where its input requires a gradient
        for name, shard in whole.items():
            layer = name.rpartition(".")[0]
            if head := head_shard(shard):
                self.shards[name] = head
                if trains:
                    weight = nn.Parameter(torch.empty(shard.shape, device=device.current_device()))
                    modules[layer].weight = self.parameters[name] = weight
            if local := adapter_shards(shard, self.shapes):
                names = [f"{layer}.{ADAPTER}.{kind}.{number}" for kind in "ab" for number in range(len(local))]
                self.shards |= dict(zip(names, [s.a for s in local] + [s.b for s in local], strict=True))
                if trains:
                    self._install(modules[layer], name, local)
                    adapter = self._by_weight[name]
                    self.parameters |= dict(zip(names, [*adapter.a, *adapter.b], strict=True))

    def _install(self, layer: Any, name: str, local: list[Any]) -> None:
        # The parts of an adapter are concatenated, in the order of the rows of the layer.
        if sorted(row for shard in local for row in shard.rows) != [row for shard in local for row in shard.rows]:
            raise UserError(
                f"lora.targets: {name} has the rows of its tensors interleaved. Leave it out of them. {self._other}"
            )
        shapes = [(shard.a.shape, shard.b.shape) for shard in local]
        adapter = Adapter(shapes, self.config.alpha / self.config.rank)
        layer.add_module(ADAPTER, adapter)
        layer.register_forward_hook(_add_adapter)
        self._by_weight[name] = adapter

    @property
    def module_parameters(self) -> frozenset[str]:
        """Names of the trained parameters in the module, which are not sharded."""
        return frozenset(self.shards)

    @property
    def adapted_parameters(self) -> frozenset[str]:
        """Names of the parameters of the module that have adapters on this rank."""
        return frozenset(self._by_weight)

    def merged(self, name: str, weight: Tensor, rows: slice) -> Tensor:
        """Returns this rank's rows of a parameter with its adapters merged into them, in float32 and rounded once."""
        if name not in self._by_weight:
            return weight
        return (weight.float() + self._by_weight[name].product(rows)).to(weight.dtype)

    def _layers(self) -> Iterable[Adapter]:
        return self._by_weight.values()

    def _shards_of(self, rank: int, weights: ShardMap) -> dict[str, Shard]:
        return self.shards  # every rank has all of them whole

    def boxes(self) -> Iterator[tuple[str, Box, Tensor]]:
        """Yields (tensor of PEFT's file, box in it, values) of all adapters."""
        for name, shard in self.shards.items():
            for piece in shard.pieces:
                yield piece.tensor, piece.source, self.parameters[name].detach()[slices(piece.target)]


def _add_adapter(layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return output + layer.adapter(inputs[0]) if layer.adapter.enabled else output
