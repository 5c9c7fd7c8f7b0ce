"""Shard map of the FSDP backend: the boxes of each parameter of the module on every rank, from DTensor placements.

A parameter of 8 rows, gate and up of 4 each (`parts` 2), on tp2 with 2 sharding ranks:

    tp 0: rows 0 1 4 5    shard 0: rows 0 1    shard 1: rows 4 5
    tp 1: rows 2 3 6 7    shard 0: rows 2 3    shard 1: rows 6 7
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as SplitDim
from torch.distributed.tensor.placement_types import _StridedShard

from verl_mg.models.tensor_index import TensorInfo
from verl_mg.sharding.boxes import Box, Piece, Shard, intersect, translate_box
from verl_mg.sharding.shard_map import ExplicitShardMap


@dataclass(frozen=True)
class ParameterSplit:
    """Division of a parameter of the module among tensor-parallel ranks, and of each part among the sharding ranks."""

    tensor_dim: int | None = None
    """Dimension that the tensor-parallel ranks divide; None where each has the whole parameter."""
    parts: int = 1
    """Parts that are packed together along it, of each of which a tensor-parallel rank has a chunk."""
    dim: int | None = None
    """Dimension that the sharding ranks divide into chunks, as `torch.chunk`; None where each has the whole part."""

    @classmethod
    def of(cls, parameter: Tensor, dim: int | None) -> ParameterSplit:
        """Returns the split of a parameter, a DTensor where tp ranks divide it; the sharding ranks divide `dim`."""
        placement = parameter.placements[0] if isinstance(parameter, DTensor) else None
        if not isinstance(placement, SplitDim | _StridedShard):
            return cls(dim=dim)
        parts = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        return cls(placement.dim % parameter.dim(), parts, dim)

    def part(self, whole: Tensor, index: int, count: int) -> Tensor:
        """Returns the part of a whole parameter on a tensor-parallel rank."""
        if self.tensor_dim is None:
            return whole
        parts = whole.chunk(self.parts, self.tensor_dim)
        return torch.cat([part.chunk(count, self.tensor_dim)[index] for part in parts], self.tensor_dim)

    def first_part(self, shape: Sequence[int], sharding: int, tp: int) -> tuple[int, ...]:
        """Returns the shape of the part on the first rank, to which FSDP pads all other ranks' parts."""
        sizes = list(shape)
        if self.tensor_dim is not None:
            sizes[self.tensor_dim] = self.parts * -(-sizes[self.tensor_dim] // (self.parts * tp))
        if self.dim is not None:
            sizes[self.dim] = -(-sizes[self.dim] // sharding)
        return tuple(sizes)


def fsdp_shard_map(
    whole: Mapping[str, Shard],
    splits: Mapping[str, ParameterSplit],
    ranks: Tensor,
    tensors: Mapping[str, TensorInfo],
) -> ExplicitShardMap:
    """Returns the shards of all ranks of a placement, from its (replicas, sharding ranks, tp) ranks."""
    shards: dict[int, Mapping[str, Shard]] = {}
    _, sharding, tp = ranks.shape
    for index, tp_index in product(range(sharding), range(tp)):
        # Ranks of different copies share one object.
        local = {
            name: _local_shard(shard, splits[name], (tp_index, tp), (index, sharding)) for name, shard in whole.items()
        }
        shards |= dict.fromkeys(ranks[:, index, tp_index].tolist(), local)
    return ExplicitShardMap(shards, tensors)


def _local_shard(shard: Shard, split: ParameterSplit, tensor: tuple[int, int], data: tuple[int, int]) -> Shard:
    """Returns the part of a whole parameter on a rank, given (index, size) on both dimensions of the mesh."""
    runs = []
    # The split has the parameter's own dimensions, of which the shard may have another order.
    for dim, size in zip(shard.order or range(len(shard.shape)), shard.shape, strict=True):
        indices = torch.arange(size)
        if split.tensor_dim == dim:  # a chunk of all, or one of each of the parts packed together
            indices = torch.cat([part.chunk(tensor[1])[tensor[0]] for part in indices.chunk(split.parts)])
        if split.dim == dim:
            chunks = indices.chunk(data[1])  # fewer than ranks, if there is less than one index for each
            indices = chunks[data[0]] if data[0] < len(chunks) else indices[:0]
        runs.append(_runs(indices))
    shape = tuple(sum(stop - start for start, stop in of_dim) for of_dim in runs)
    pieces = []
    for ranges in product(*map(_with_targets, runs)):
        source: Box = tuple(each for each, _ in ranges)
        target: Box = tuple(each for _, each in ranges)
        pieces += [
            _moved(piece, common, translate_box(common, source, target))
            for piece in shard.pieces
            if (common := intersect(piece.target, source)) is not None
        ]
    return Shard(shape, tuple(pieces), order=shard.order)


def _runs(indices: Tensor) -> list[tuple[int, int]]:
    if not len(indices):
        return []
    breaks = (indices.diff() != 1).nonzero().flatten().add(1).tolist()
    return [(int(part[0]), int(part[-1]) + 1) for part in indices.tensor_split(breaks)]


def _with_targets(runs: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Returns each range of a whole dimension with its place in the local one."""
    placed, at = [], 0
    for start, stop in runs:
        placed.append(((start, stop), (at, at + stop - start)))
        at += stop - start
    return placed


def _moved(piece: Piece, part: Box, target: Box) -> Piece:
    """Returns a part of a piece of the whole parameter, which is at `target` in the local one."""
    return Piece(piece.tensor, piece.source_of(part), target)
