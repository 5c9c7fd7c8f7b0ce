"""Index of a model's tensors by their Hugging Face names, in the order of the layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from verl_mg.dtypes import ITEM_BYTES, torch_dtype
from verl_mg.models.tensor_tree import ModelSpec, StackedTensor, TensorSpec, tensors_of

if TYPE_CHECKING:
    import torch

OUTPUT = "lm_head.weight"  # name of the output layer in files of all families with a table


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Properties of a tensor on which all ranks of a model agree."""

    position: int  # position in the order in which tensors are stored and moved
    shape: tuple[int, ...]
    dtype: str | None = None  # name of the dtype in which the tensor is stored and travels; None: the model's

    def wire_dtype(self, default: torch.dtype) -> torch.dtype:
        """Returns the dtype in which the tensor travels; `default`: the dtype of the model."""
        return torch_dtype(self.dtype) if self.dtype else default

    def itemsize(self, default: int) -> int:
        """Returns the bytes of an element; `default`: of one in the dtype of the model."""
        return ITEM_BYTES[self.dtype] if self.dtype else default


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the checkpoint as an instance of a `TensorSpec`."""

    position: int  # position in the order of the index
    tensor: TensorSpec  # the specification, with placeholders in its name
    layer: int | None = None  # index of the layer; None outside the layers
    expert: int | None = None  # index of the expert in its layer
    stacked: bool = False  # whether it stacks all experts of its layer
    vision: bool = False  # whether it belongs to the part of a model that only images pass through
    multi_token: bool = False
    """Whether it belongs to the layer of multi-token prediction, which log-probs do not depend on."""

    @property
    def of_experts(self) -> bool:
        """Whether it belongs to routed experts, of which a token passes through a few."""
        return self.expert is not None or self.stacked

    @property
    def is_layer_matrix(self) -> bool:
        """Whether it is a matrix inside the layers: not the embedding, the output layer, a norm, a bias or a table."""
        return self.layer is not None and len(self.tensor.shape) == 2 and not self.tensor.is_integer


@dataclass(frozen=True, eq=False)
class TensorIndex:
    """All tensors of a checkpoint by name."""

    entries: Mapping[str, TensorEntry]  # {name: entry}, in the order in which tensors are stored and moved
    tied: bool
    copies: Mapping[str, str] = field(default_factory=dict)
    """{tensor: the tensor that it repeats}, of those that files may have although the model ties them."""

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """The properties of every tensor on which all ranks agree."""
        return {
            name: TensorInfo(entry.position, entry.tensor.shape, entry.tensor.dtype)
            for name, entry in self.entries.items()
        }

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the tensors that have their own."""
        return {name: torch_dtype(info.dtype) for name, info in self.tensors.items() if info.dtype}

    @cached_property
    def stacked(self) -> dict[str, StackedTensor]:
        """Places of the tensors that the files stack, by their own names; empty for most architectures."""
        places, experts = {}, 1 + max((entry.expert or 0 for entry in self.entries.values()), default=0)
        for name, entry in self.entries.items():
            stack, shape = entry.tensor.stack, entry.tensor.shape
            if stack is not None and entry.expert is not None:
                in_files = stack.name.format(layer=entry.layer), stack.shape(experts, shape)
                places[name] = StackedTensor(*in_files, entry.expert, stack.transposed, stack.first_row, shape[0])
        return places

    @cached_property
    def transposed(self) -> frozenset[str]:
        """Names of the tensors that the files stack transposed."""
        return frozenset(name for name, place in self.stacked.items() if place.transposed)

    @property
    def has_stacks(self) -> bool:
        """Whether the experts' matrices are in stacks that are not taken apart, or transposed ones."""
        return bool(self.transposed) or any(entry.stacked for entry in self.entries.values())


def index_of(model: ModelSpec) -> TensorIndex:
    """Returns the tensors of a model, layer by layer, expert by expert."""
    entries: dict[str, TensorEntry] = {}

    def add(tensor: TensorSpec, layer: int | None = None, expert: int | None = None) -> None:
        name = tensor.name.format(layer=layer, expert=expert)
        multi_token = layer is not None and layer >= len(model.layers)
        entries[name] = TensorEntry(len(entries), tensor, layer, expert, multi_token=multi_token)

    add(model.embedding)
    for number, layer in enumerate(model.all_layers):
        behind = number == len(model.layers)
        tensors = list(tensors_of(model.multi_token if behind else layer))
        for tensor in tensors:
            if not tensor.per_expert:
                add(tensor, number)
        for expert in range(layer.num_experts):
            for tensor in tensors:
                if tensor.per_expert:
                    add(tensor, number, expert)
    add(model.final_norm)
    tied = model.output is model.embedding  # by identity: the checkpoint has one tensor for both
    if not tied:
        add(model.output)
    return TensorIndex(entries, tied, {OUTPUT: model.embedding.name} if tied else {})
