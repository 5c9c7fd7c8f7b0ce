"""All tensors of a checkpoint by name, in the order in which they are stored and moved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from verl_mg.models.hf_tensors import ModelSpec, TensorSpec, tensors_of


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What all holders of a model agree on: a tensor's place in the order, its shape, whether it stays float32."""

    position: int
    shape: tuple[int, ...]
    float32: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its place in the order, what it is an instance of, and of which layer and expert."""

    position: int
    tensor: TensorSpec
    layer: int | None = None
    expert: int | None = None


class TensorIndex:
    """{name: Entry} of a model, layer by layer, expert by expert."""

    def __init__(self, model: ModelSpec) -> None:
        self.entries: dict[str, Entry] = {}
        self._add(model.embedding)
        for layer, block in enumerate(model.blocks):
            tensors = list(tensors_of(block))
            for tensor in tensors:
                if not tensor.per_expert:
                    self._add(tensor, layer)
            for expert in range(block.experts):
                for tensor in tensors:
                    if tensor.per_expert:
                        self._add(tensor, layer, expert)
        self._add(model.final_norm)
        if model.output is not model.embedding:
            self._add(model.output)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """The same without what only the table needs."""
        return {
            name: TensorInfo(entry.position, entry.tensor.shape, entry.tensor.float32)
            for name, entry in self.entries.items()
        }

    def _add(self, tensor: TensorSpec, layer: int | None = None, expert: int | None = None) -> None:
        name = tensor.name.format(layer=layer, expert=expert)
        self.entries[name] = Entry(len(self.entries), tensor, layer, expert)
