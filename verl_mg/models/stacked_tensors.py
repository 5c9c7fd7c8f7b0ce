"""Tensors of experts that the files of a checkpoint stack, transposed: those of gpt-oss.

    weight table, and runtimes        files
    experts.0.gate_up_proj (r, c)  \\
    experts.1.gate_up_proj (r, c)   > experts.gate_up_proj (experts, c, r)
    ...                            /

Everywhere else each expert has its own tensors, matrices as (out, in), as with other architectures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """Place of an expert's tensor in a tensor of the files that stacks those of all experts, each transposed."""

    name: str
    """Name of the stacked tensor."""
    shape: tuple[int, ...]
    """Shape of the stacked tensor: (experts, columns, rows), or (experts, rows) of biases."""
    index: int
    """Index of the expert."""

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """Shape of the expert's tensor."""
        return self.shape[:0:-1]

    def box(self, box: Ranges) -> Ranges:
        """Returns the box of the stacked tensor that has the elements of a box of the expert's tensor."""
        return ((self.index, self.index + 1), *reversed(box))


def expert_shapes(
    shapes: Mapping[str, tuple[int, ...]], stacked: Mapping[str, StackedTensor]
) -> dict[str, tuple[int, ...]]:
    """Replaces the stacked tensors of a checkpoint by those of the experts, in the same place of the order.

    Args:
        shapes: {name: shape} in the files.
        stacked: places of the experts' tensors.
    """
    members: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, place in stacked.items():
        members.setdefault(place.name, {})[name] = place.expert_shape
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        result |= members.get(name, {name: shape})
    return result
