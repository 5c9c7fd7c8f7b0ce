"""Whole matrices of weights that are cut into boxes on many ranks: gathered, mapped and returned.

Each matrix has one owner among the ranks that have a part of it, so that it is computed once. Two all-to-alls move what
the owner does not have itself:

    rank 0   [q  k/]      q, k/, /k: boxes of the matrices q and k in the shards of the ranks
    rank 1   [/k  v]

             to the owners            there                 back to the shards
    rank 0   q, k/ + /k        ->     f(q), f(k)     ->     f(q), first rows of f(k)
    rank 1   v                 ->     f(v)           ->     last rows of f(k), f(v)

The owners work in rounds, which bound the memory; in a round each has its own matrices, so that all ranks compute.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.sharding.boxes import Box, numel, slices

ROUND_ELEMENTS = 2**25
"""Elements of the matrices of an owner in a round, unless a single one is larger: 64 MiB in bfloat16. So the memory of
an exchange does not grow with the model."""

Shape = tuple[int, ...]
Named = tuple[str, Box]  # a matrix, and a box in it


@dataclass(frozen=True)
class Part:
    """A box of a matrix in a flat shard of a weight."""

    matrix: str
    box: Box  # box in the matrix
    shard: int  # index of the shard
    start: int  # first element, in the shard, of a range that contains the box
    around: Shape  # shape of the range
    inside: Box  # box of the same elements in the range; dimensions before the matrix's have length 1

    def view(self, shards: Sequence[Tensor]) -> Tensor:
        """Returns the elements, in the order of the box, as a view of the shard."""
        flat = shards[self.shard][self.start : self.start + math.prod(self.around)]
        return flat.view(self.around)[slices(self.inside)]


@dataclass(frozen=True)
class Assignment:
    """Owner of a matrix, and the round in which it is computed."""

    owner: int  # rank in the group
    round: int


def assign(held: Sequence[Sequence[Named]], shapes: Mapping[str, Shape]) -> dict[str, Assignment]:
    """Chooses an owner for each matrix: the least busy of the ranks that have a part of it."""
    # The largest matrices come first, so that the work of the ranks differs by little more than a small matrix.
    elements: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for rank, parts in enumerate(held):
        for name, box in parts:
            elements[name][rank] += numel(box)
    work, filled = [0.0] * len(held), [0] * len(held)
    assigned = {}
    # Every rank computes the assignment itself: the order must be the same on all.
    for name in sorted(elements, key=lambda name: (-math.prod(shapes[name]), shapes[name], name)):
        owner = min(elements[name], key=lambda rank: (work[rank], -elements[name][rank], rank))
        work[owner] += math.prod(shapes[name]) * min(shapes[name])  # proportional to FLOPs of products of the matrix
        assigned[name] = Assignment(owner, filled[owner] // ROUND_ELEMENTS)
        filled[owner] += math.prod(shapes[name])
    return assigned


class MatrixExchange:
    """Plan of the transfers of the matrices in the shards of a group of ranks."""

    def __init__(self, parts: Sequence[Part], shapes: Mapping[str, Shape], group: dist.ProcessGroup) -> None:
        self._group = group
        # Once in a run: the boxes of shards do not change.
        held: list[list[Named]] = [[] for _ in range(group.size())]
        dist.all_gather_object(held, [(part.matrix, part.box) for part in parts], group=group)
        assigned = assign(held, shapes)
        count = 1 + max((to.round for to in assigned.values()), default=-1)
        self._rounds = [_Round(group.size()) for _ in range(count)]
        for part in parts:
            to = assigned[part.matrix]
            self._rounds[to.round].sent[to.owner].append(part)
        for name, to in assigned.items():
            if to.owner == group.rank():
                self._rounds[to.round].owned[name] = shapes[name]
        for rank, boxes in enumerate(held):
            for name, box in boxes:
                to = assigned[name]
                if to.owner == group.rank():
                    self._rounds[to.round].received[rank].append((name, box))

    def apply(self, shards: Sequence[Tensor], function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        """Replaces the matrices in the flat shards by functions of them, sent in `dtype`; a collective of the group.

        `function` maps matrices (k, m, n) of one shape to others of that shape.
        """
        for planned in self._rounds:
            views = [part.view(shards) for parts in planned.sent for part in parts]
            sent_sizes = [sum(numel(part.box) for part in parts) for parts in planned.sent]
            received_sizes = [sum(numel(box) for _, box in boxes) for boxes in planned.received]
            sent = self._flat(views, dtype)
            received = self._all_to_all(sent, sent_sizes, received_sizes)
            boxes = [named for boxes in planned.received for named in boxes]
            results = _mapped(boxes, received, planned.owned, function)
            computed = self._flat([results[name][slices(box)] for name, box in boxes], dtype)
            returned = self._all_to_all(computed, received_sizes, sent_sizes)
            for view, values in zip(views, returned.split([view.numel() for view in views]), strict=True):
                view.copy_(values.view(view.shape))

    def _flat(self, values: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        none = torch.empty(0, dtype=dtype, device=device.current_device())
        return torch.cat([part.to(dtype).flatten() for part in values]) if values else none

    def _all_to_all(self, values: Tensor, sizes: list[int], received_sizes: list[int]) -> Tensor:
        if self._group.size() == 1:
            return values
        received = values.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, values, received_sizes, sizes, group=self._group)
        return received


class _Round:
    """Transfers of a round, by the rank at the other end."""

    def __init__(self, ranks: int) -> None:
        self.sent: list[list[Part]] = [[] for _ in range(ranks)]
        self.received: list[list[Named]] = [[] for _ in range(ranks)]
        self.owned: dict[str, Shape] = {}


def _mapped(
    boxes: Sequence[Named], values: Tensor, shapes: Mapping[str, Shape], function: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Assembles matrices from their boxes and applies the function to all of one shape together."""
    groups = [(shape, list(names)) for shape, names in groupby(shapes, key=lambda name: shapes[name])]
    stacks = [values.new_empty(len(names), *shape) for shape, names in groups]
    matrices: dict[str, Tensor] = {}
    for (_, names), stack in zip(groups, stacks, strict=True):
        matrices.update(zip(names, stack, strict=True))
    for (name, box), part in zip(boxes, values.split([numel(box) for _, box in boxes]), strict=True):
        target = matrices[name][slices(box)]
        # Replicas of a box have equal values, so the last one may win.
        target.copy_(part.view(target.shape))
    for (_, names), stack in zip(groups, stacks, strict=True):
        matrices.update(zip(names, function(stack), strict=True))
    return matrices
