"""Low-rank adapters (LoRA, arXiv:2106.09685) of a model on one rank, as both backends have them.

The weights under them are frozen: no gradients and no optimizer state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.nn import Parameter

from verl_mg.checkpoint.peft import adapted_tensors, adapter_shapes, initial_adapters, read_adapters
from verl_mg.config import LoraConfig
from verl_mg.models.tensor_index import TensorInfo
from verl_mg.sharding.boxes import Shard, slices
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.shard_map import ExplicitShardMap, ShardMap

ADAPTER = "adapter"  # attribute name of the adapters in their layer


class LayerAdapter(Protocol):
    """Adapters of the tensors of one layer."""

    enabled: bool  # whether the layer adds its adapters


class Adapters(ABC):
    """Adapters of a model on one rank, installed in its layers; all other weights but a value head are frozen.

    Attributes:
        config: LoRA settings.
        adapted: names of the checkpoint's tensors that have an adapter.
        shapes: shapes of the tensors of PEFT's file by name.
        parameters: trained parameters by name.
        shards: for each trained parameter, its boxes of the tensors of PEFT's file.
    """

    def __init__(self, table: ModelTable, lora: LoraConfig) -> None:
        self.config = lora
        self.adapted = adapted_tensors(table, lora.targets, lora.experts)
        self.shapes = adapter_shapes(table, self.adapted, lora.rank)
        self.parameters: dict[str, Parameter] = {}
        self.shards: dict[str, Shard] = {}

    @property
    @abstractmethod
    def adapted_parameters(self) -> frozenset[str]:
        """Names of the parameters of the model that have adapters on this rank."""

    @abstractmethod
    def _layers(self) -> Iterable[LayerAdapter]:
        """Returns the adapters of the layers on this rank."""

    @abstractmethod
    def _shards_of(self, rank: int, weights: ShardMap) -> dict[str, Shard]:
        """Returns the shards of the adapters of any rank of the model, by names as in `parameters`."""

    @torch.no_grad()
    def initialize(self) -> None:
        """Draws the values of the adapters, or reads them from `lora.path`."""
        path = self.config.path
        read = (
            initial_adapters(self.shapes, self.config.seed)
            if path is None
            else read_adapters(path, self.shapes, self.config)
        )
        for name, parameter in self.parameters.items():
            if path is None and ADAPTER not in name.split("."):
                continue  # a head is loaded with the model
            for piece in self.shards[name].pieces:
                parameter[slices(piece.target)] = read(piece.tensor, piece.source)

    def shard_map(self, weights: ShardMap) -> ExplicitShardMap:
        """Returns the shards of the adapters of every rank, by the names of `parameters` and of PEFT's tensors."""
        infos = {name: TensorInfo(number, shape) for number, (name, shape) in enumerate(self.shapes.items())}
        return ExplicitShardMap({rank: self._shards_of(rank, weights) for rank in weights.ranks}, infos)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Returns a block in which the model is the one that the adapters are trained on."""
        for adapter in self._layers():
            adapter.enabled = False
        try:
            yield
        finally:
            for adapter in self._layers():
                adapter.enabled = True
