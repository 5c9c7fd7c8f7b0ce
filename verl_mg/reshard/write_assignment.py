"""Who writes which box when a model is saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl_mg.reshard.routing import BoxRouting
from verl_mg.sharding.boxes import Box
from verl_mg.sharding.shard_map import ShardMap

_NOBODY = -1


@dataclass(frozen=True, slots=True)
class WriteAssignment:
    """A box of a tensor that a rank writes, and where it stands on it."""

    tensor: str
    box: Box
    parameter: str
    at: Box


def assign_writes(source: ShardMap, rank: int) -> Iterator[WriteAssignment]:
    """The boxes that `rank` writes: of all ranks together each box of the model once, its holders taking turns."""
    for parameter, shard in source.shards(rank).items():
        for piece in shard.pieces:
            place = next(place for place in source.places(piece.tensor) if place.box == piece.source)
            spot = place.on(rank)
            # A file is a needer on a node of its own.
            writer = BoxRouting(place.ranks, (_NOBODY,), node=1).source_of(
                _NOBODY, source.tensors[piece.tensor].position
            )
            if rank == writer and (spot.parameter, spot.at) == (parameter, piece.target):
                yield WriteAssignment(piece.tensor, piece.source, parameter, piece.target)
