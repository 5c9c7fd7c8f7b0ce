"""Shards and sizes of a module, computed without ranks, process groups or memory for its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from verl_mg.config import FsdpConfig
from verl_mg.fsdp.mesh import check_mesh, rank_grid
from verl_mg.fsdp.model import (
    build_module,
    check_module_layout,
    logit_scale_of,
    parameter_splits,
    shard_tensors,
    sharded_blocks,
)
from verl_mg.fsdp.shard_map import fsdp_shard_map
from verl_mg.layout import Layout, Placement
from verl_mg.sharding.module_table import ModuleTable
from verl_mg.sharding.shard_map import ShardMap


@dataclass(frozen=True)
class GatheredGroup:
    """Parameters that are gathered together: of a layer, or all outside of layers."""

    sharded: int  # elements of a rank's parts, padding included: as many on every rank
    trained: int  # number of these elements that have gradients


class ShardedModule:
    """Module of a model directory under a layout, as `FsdpRunner` shards it.

    Attributes:
        sharding: number of ranks that divide a copy of the parameters.
        layers: the parameters of each layer, of a vision tower too.
        rest: the parameters outside of layers, which stay gathered from a forward pass to the end of its backward pass.
        buffer_bytes: bytes of buffers, which every rank has whole.
    """

    def __init__(self, divided: Callable[[int], Any], table: ModuleTable, layout: Layout, options: FsdpConfig) -> None:
        check_mesh(layout, options.replicas)
        check_module_layout(divided(1), layout, str(table.model_dir / "config.json"))
        module = divided(layout.tp)
        self._table, self._replicas, self._layout = table, options.replicas, layout
        self.sharding = layout.dp * layout.cp // options.replicas
        self._splits = splits = parameter_splits(module, self.sharding)
        frozen = table.vision_parameters if options.freeze_vision_tower else frozenset()
        named = dict(module.named_parameters())
        # By identity: a tied parameter has one name in `named`, in a layer or outside.
        layers = [{id(parameter) for parameter in block.parameters()} for block in sharded_blocks(module)]
        parts = {
            name: math.prod(splits[name].first_part(tuple(parameter.shape), self.sharding, layout.tp))
            for name, parameter in named.items()
        }

        def group(names: list[str]) -> GatheredGroup:
            return GatheredGroup(
                sum(parts[name] for name in names), sum(parts[name] for name in names if name not in frozen)
            )

        self.layers = tuple(group([n for n, parameter in named.items() if id(parameter) in layer]) for layer in layers)
        in_layers = set().union(*layers)
        self.rest = group([n for n, parameter in named.items() if id(parameter) not in in_layers])
        self.buffer_bytes = sum(buffer.nbytes for buffer in module.buffers())

    @property
    def groups(self) -> tuple[GatheredGroup, ...]:
        """The groups of layers, and the rest."""
        return (*self.layers, self.rest)

    @property
    def sharded(self) -> int:
        """Elements of a rank's parts of all parameters."""
        return sum(group.sharded for group in self.groups)

    @property
    def trained(self) -> int:
        """Elements of a rank's parts that have gradients."""
        return sum(group.trained for group in self.groups)

    def shard_map(self, ranks: Sequence[int]) -> ShardMap:
        """Returns the shards of ranks in increasing order, as many as the layout has."""
        grid = rank_grid(Placement(self._layout, tuple(ranks)), self._replicas)
        table = self._table
        return fsdp_shard_map(table.parameter_shards(), self._splits, grid, table.tensor_index.tensors)


def divided_module(table: ModuleTable, is_packed: bool, tp: int) -> Any:
    """Builds a module with its parameters divided among tensor-parallel ranks, of which this process is the first."""
    # The real module on a mesh without process groups: a plan has no rules of division that could differ from a job's.
    module = build_module(table.model_dir, table.head, torch.float32, is_packed)
    # For its error: the result is not needed here.
    logit_scale_of(module, table.head, table.model_dir)
    mesh = DeviceMesh("cpu", torch.arange(tp), _init_backend=False, _rank=0) if tp > 1 else None
    shard_tensors(module, mesh, str(table.model_dir / "config.json"))
    return module
