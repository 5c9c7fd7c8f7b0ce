"""Who gets a box from whom, when some ranks hold it and others need it. Pure arithmetic on rank numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

Ranks = tuple[int, ...]

# The fractional part of the golden ratio, in 32 bits: its multiples fall evenly into any number of bins.
_GOLDEN, _BITS = 0x9E3779B9, 32


class BoxRouting:
    """One set of holders and one of needers, on nodes of `node` ranks.

    A needer that holds the box takes its own. Where a node has holders, its needers share them. A node without
    one lets the box in once: a needer, the gateway, receives it and hands it on to the others of the node. `turn`, a
    number of the box, rotates holders and gateways, so that over many boxes all do the same work.
    """

    def __init__(self, holders: Ranks, needers: Ranks, node: int) -> None:
        self._node, self.holders = node, holders
        held = set(holders)
        self.wanting: dict[int, list[int]] = defaultdict(list)
        for rank in needers:
            if rank not in held:
                self.wanting[rank // node].append(rank)
        self._near: dict[int, list[int]] = defaultdict(list)
        for rank in holders:
            if rank // node in self.wanting:
                self._near[rank // node].append(rank)
        self._far = [place for place in self.wanting if place not in self._near]

    def source_of(self, rank: int, turn: int) -> int:
        """The rank that `rank`, a needer, takes the box from; itself where it holds it."""
        place = rank // self._node
        peers = self.wanting.get(place, [])
        if rank not in peers:
            return rank
        if near := self._near.get(place):
            return near[(_spin(turn, len(near)) + peers.index(rank)) % len(near)]
        gateway = self._gateway(place, turn)
        if rank != gateway:
            return gateway
        return self.holders[(_spin(turn, len(self.holders)) + self._far.index(place)) % len(self.holders)]

    def forwarded(self, rank: int, turn: int) -> bool:
        """Whether `rank`, a needer without the box, gets it from its node's gateway."""
        place = rank // self._node
        return place not in self._near and rank != self._gateway(place, turn)

    def served_by(self, rank: int, turn: int) -> Iterator[int]:
        """The ranks that a holder sends the box to."""
        place = rank // self._node
        near = self._near.get(place, [])
        if near:
            first = (near.index(rank) - _spin(turn, len(near))) % len(near)
            yield from self.wanting[place][first :: len(near)]
        if self._far:
            first = (self.holders.index(rank) - _spin(turn, len(self.holders))) % len(self.holders)
            for far in self._far[first :: len(self.holders)]:
                yield self._gateway(far, turn)

    def relayed_by(self, rank: int, turn: int) -> list[int]:
        """The ranks that a needer hands the box on to: the others of its node, where it is the gateway."""
        place = rank // self._node
        if place in self._near or rank != self._gateway(place, turn):
            return []
        return [peer for peer in self.wanting[place] if peer != rank]

    def shares(self) -> Iterator[tuple[int, float, float]]:
        """(rank, how often it receives the box, how often from another node), for every rank that lacks it.

        Which needer of a node is the gateway rotates: each enters its share.
        """
        for place, peers in self.wanting.items():
            entering = 0.0 if place in self._near else 1.0 / len(peers)
            for rank in peers:
                yield rank, 1.0, entering

    def work(self) -> Iterator[tuple[int, float]]:
        """(rank, how often it sends the box in the mean over turns)."""
        for place, near in self._near.items():
            for rank in near:
                yield rank, len(self.wanting[place]) / len(near)
        if self._far:
            for rank in self.holders:
                yield rank, len(self._far) / len(self.holders)
        for place in self._far:
            peers = self.wanting[place]
            for rank in peers:
                yield rank, (len(peers) - 1) / len(peers)

    def _gateway(self, place: int, turn: int) -> int:
        peers = self.wanting[place]
        return peers[_spin(turn, len(peers))]


def _spin(turn: int, size: int) -> int:
    """The bin of `size` that a turn falls into."""
    return ((turn * _GOLDEN) & ((1 << _BITS) - 1)) * size >> _BITS
