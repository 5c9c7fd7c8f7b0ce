r"""Tensors of experts that the files of a checkpoint stack: of gpt-oss, and of Qwen3.5 as it is published.

    weight table, and runtimes        files of gpt-oss, transposed
    experts.0.gate_up_proj (r, c)  \
    experts.1.gate_up_proj (r, c)   > experts.gate_up_proj (experts, c, r)
    ...                            /

    weight table, and runtimes        files of Qwen3.5
    experts.0.gate_proj (r, c)     \
    experts.0.up_proj (r, c)        > experts.gate_up_proj (experts, 2 r, c), gate first
    ...                            /

With r = 2, c = 3, rows 0:1 of up_proj of expert 1 of Qwen3.5, the box ((0, 1), (0, 3)), are the box
((1, 2), (2, 3), (0, 3)) of the stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Everywhere else each expert has separate tensors, matrices as (out, in), as with other architectures: expert
# parallelism, resharding and the tables of engines need no second way.
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensor of the files that stacks tensors of all experts."""

    name: str  # name of the tensor, with `{layer}` as placeholder
    transposed: bool = True  # whether it has the experts' tensors transposed
    first_row: int = 0  # row at which the expert's tensor begins, of a tensor that is not transposed
    rows: int = 0  # rows of an expert in it, of a tensor that is not transposed

    def shape(self, experts: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the tensor for the number of experts and the shape of an expert's tensor."""
        return (experts, *reversed(shape)) if self.transposed else (experts, self.rows, *shape[1:])


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """Place of an expert's tensor in a tensor of the files that stacks the tensors of all experts."""

    name: str
    shape: tuple[int, ...]
    """Shape of the stacked tensor; transposed (experts, columns, rows), or (experts, rows) of biases."""
    index: int
    transposed: bool = True  # whether the stack has the experts' tensors transposed
    first_row: int = 0  # row of the stack at which the expert's tensor begins, where it is not transposed
    rows: int = 0  # rows of the expert's tensor, where it is not transposed

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """Shape of the expert's tensor."""
        return self.shape[:0:-1] if self.transposed else (self.rows, *self.shape[2:])

    def box(self, box: Ranges) -> Ranges:
        """Returns the box of the stacked tensor that has the elements of a box of the expert's tensor."""
        expert = (self.index, self.index + 1)
        if self.transposed:
            return (expert, *reversed(box))
        (start, stop), *others = box
        return (expert, (start + self.first_row, stop + self.first_row), *others)


def expert_shapes(
    shapes: Mapping[str, tuple[int, ...]], stacked: Mapping[str, StackedTensor]
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a checkpoint with the experts' tensors, in order, in place of each stacked one."""
    members: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, place in stacked.items():
        members.setdefault(place.name, {})[name] = place.expert_shape
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        result |= members.get(name, {name: shape})
    return result
