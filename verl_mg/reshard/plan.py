"""Which box goes from which rank to which: an intersection of the boxes that both sides name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from verl_mg.weights.boxes import Box, Shard, carry, extents, intersect, volume

Holdings = Mapping[int, Mapping[str, Shard]]
"""What each global rank holds: {rank: {parameter: Shard}}."""


@dataclass(frozen=True)
class Move:
    """One box of a Hugging Face tensor, from a parameter of one rank to a parameter of another (or the same)."""

    tensor: str
    source_rank: int
    source: str
    source_box: Box
    target_rank: int
    target: str
    target_box: Box

    @property
    def elements(self) -> int:
        """How many elements are moved."""
        return volume(self.target_box)

    @property
    def local(self) -> bool:
        """Source and target are one rank: nothing goes over the wire."""
        return self.source_rank == self.target_rank


@dataclass(frozen=True)
class Plan:
    """All moves of one sync, in an order that every rank derives alike."""

    moves: tuple[Move, ...]

    def elements_received(self, rank: int) -> int:
        """Elements that come to `rank` over the wire."""
        return sum(move.elements for move in self.moves if move.target_rank == rank and not move.local)


@dataclass(frozen=True)
class _Place:
    rank: int
    parameter: str
    box: Box


def plan(source: Holdings, target: Holdings) -> Plan:
    """The moves that fill every element of `target`: from the rank itself where it holds the box, else from the
    rank that has sent least so far. Each element arrives once.

    Raises ValueError naming the tensor and the box when the source does not cover the target.
    """
    held = _index(source)
    sent: dict[int, int] = defaultdict(int)
    moves: list[Move] = []
    for rank, shards in sorted(target.items()):
        for parameter, shard in shards.items():
            for piece in shard.pieces:
                missing = volume(piece.source)
                for box, places in held.get(piece.tensor, {}).items():
                    common = intersect(box, piece.source)
                    if common is None:
                        continue
                    place = _choose(places, rank, sent)
                    moves.append(
                        Move(
                            piece.tensor,
                            place.rank,
                            place.parameter,
                            carry(common, box, place.box),
                            rank,
                            parameter,
                            carry(common, piece.source, piece.target),
                        )
                    )
                    missing -= volume(common)
                    if place.rank != rank:
                        sent[place.rank] += volume(common)
                if missing:
                    raise ValueError(
                        f"{piece.tensor}: {missing} elements of the box {piece.source} that rank {rank} needs for "
                        f"{parameter} are {'nowhere in the source' if missing > 0 else 'in overlapping source boxes'}"
                    )
    return Plan(tuple(moves))


def owners(source: Holdings) -> dict[int, list[tuple[str, Box, str, Box]]]:
    """Who writes which box when `source` is saved: each distinct box once, spread over the ranks that hold it.

    {rank: [(tensor, box in it, parameter, box in the parameter)]}
    """
    load: dict[int, int] = defaultdict(int)
    duties: dict[int, list[tuple[str, Box, str, Box]]] = defaultdict(list)
    for tensor, boxes in _index(source).items():
        for box, places in boxes.items():
            place = min(places, key=lambda p: (load[p.rank], p.rank))
            load[place.rank] += volume(box)
            duties[place.rank].append((tensor, box, place.parameter, place.box))
    return dict(duties)


def _index(source: Holdings) -> dict[str, dict[Box, list[_Place]]]:
    """{tensor: {box: the places that hold it}}"""
    held: dict[str, dict[Box, list[_Place]]] = defaultdict(lambda: defaultdict(list))
    for rank, shards in sorted(source.items()):
        for parameter, shard in shards.items():
            for piece in shard.pieces:
                assert extents(piece.source) == extents(piece.target)
                held[piece.tensor][piece.source].append(_Place(rank, parameter, piece.target))
    return held


def _choose(places: list[_Place], rank: int, sent: Mapping[int, int]) -> _Place:
    own = [place for place in places if place.rank == rank]
    return own[0] if own else min(places, key=lambda place: (sent[place.rank], place.rank))
