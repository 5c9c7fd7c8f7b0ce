"""Which box goes from which rank to which: an intersection of the boxes that both sides name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property

from verl_mg.reshard.routing import BoxRouting, Ranks
from verl_mg.reshard.validate import check
from verl_mg.sharding.boxes import Box, intersect, numel, translate_box
from verl_mg.sharding.shard_map import BoxLocation, BoxReplicas, ShardMap

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box that a rank sends to `peer` or receives from it, and where it stands on the rank itself.

    A relayed box comes from a rank that received it for its own target, and is sent out of that target.
    """

    peer: int
    tensor: str
    box: Box
    parameter: str
    at: Box
    forwarded: bool


@dataclass(frozen=True, slots=True)
class Copy:
    """A box that a rank takes from itself: of its source, or, where it needs it twice, of its own target."""

    tensor: str
    source: str
    source_at: Box
    target: str
    target_at: Box
    of_target: bool = False


@dataclass(frozen=True)
class RankPlan:
    """What one rank does: copies, sends and receives in the order of the tensors."""

    copies: tuple[Copy, ...]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


@dataclass
class RankTraffic:
    """Bytes of one rank in one sync: received, of these from other nodes, sent (the mean over turns), lower bound."""

    received: int = 0
    entered: float = 0.0
    sent: float = 0.0
    lower_bound: int = 0


class Plan:
    """All moves from `source` to `target`; each rank derives its own part, and none needs to speak for that.

    A rank receives exactly what it needs and does not hold, once. Sources are the rank itself, then its node, then
    the holders in rotation; between nodes a byte enters a node once (see `BoxRouting`).
    """

    def __init__(self, source: ShardMap, target: ShardMap, node: int, leave: frozenset[str]) -> None:
        self.source, self.target, self.node, self._leave = source, target, node, leave
        self._relations: dict[tuple[int, int], BoxRouting] = {}
        self._parts: dict[int, RankPlan] = {}
        check(source, target, [names[0] for names in self._kinds.values()])

    def of(self, rank: int) -> RankPlan:
        """The part of one rank."""
        if rank not in self._parts:
            copies, receives = self._incoming(rank)
            self._parts[rank] = RankPlan(copies, tuple(self._outgoing(rank)), receives)
        return self._parts[rank]

    def bytes_received(self, rank: int, itemsize: int) -> int:
        """Bytes that come to a rank over the wire, with `itemsize` bytes an element that need not stay float32."""
        return sum(numel(move.box) * self.itemsize(move.tensor, itemsize) for move in self.of(rank).receives)

    def lower_bound(self, rank: int, itemsize: int) -> int:
        """Bytes that a rank needs and does not hold: no way to move the weights can bring it less."""
        held: dict[str, set[Box]] = defaultdict(set)
        needed: dict[str, set[Box]] = defaultdict(set)
        for found, shard_map in ((held, self.source), (needed, self.target)):
            for shard in shard_map.shards(rank).values():
                for piece in shard.pieces:
                    found[piece.tensor].add(piece.source)
        total = 0
        for tensor in needed.keys() - self._leave:
            for box in needed[tensor]:
                own = sum(numel(common) for b in held.get(tensor, ()) if (common := intersect(b, box)))
                total += (numel(box) - own) * self.itemsize(tensor, itemsize)
        return total

    def traffic(self, itemsize: int) -> dict[int, RankTraffic]:
        """Bytes of every rank of source and target in one sync."""
        moved: dict[BoxRouting, int] = defaultdict(int)
        needed: dict[Ranks, int] = defaultdict(int)
        held: dict[tuple[Ranks, Ranks], int] = defaultdict(int)
        for names in self._kinds.values():
            scale = len(names) * self.itemsize(names[0], itemsize)
            sources, targets = self.source.places(names[0]), self.target.places(names[0])
            for there in targets:
                needed[there.ranks] += numel(there.box) * scale
                for here in sources:
                    if common := intersect(here.box, there.box):
                        moved[self._relation(here.ranks, there.ranks)] += numel(common) * scale
                        held[here.ranks, there.ranks] += numel(common) * scale
        ranks = {rank: RankTraffic() for rank in sorted({*self.source.ranks, *self.target.ranks})}
        for relation, size in moved.items():
            for rank, received, entered in relation.shares():
                ranks[rank].received += int(received) * size
                ranks[rank].entered += entered * size
            for rank, sent in relation.work():
                ranks[rank].sent += sent * size
        for needers, size in needed.items():
            for rank in needers:
                ranks[rank].lower_bound += size
        for (holders, needers), size in held.items():
            for rank in set(holders).intersection(needers):
                ranks[rank].lower_bound -= size
        return ranks

    def itemsize(self, tensor: str, itemsize: int) -> int:
        """Bytes of an element of a tensor, `itemsize` unless it stays float32."""
        return FLOAT32_BYTES if self.source.tensors[tensor].float32 else itemsize

    def position(self, tensor: str) -> int:
        """The place of a tensor in the order in which tensors are moved."""
        return self.source.tensors[tensor].position

    @cached_property
    def _kinds(self) -> dict[tuple[Hashable, Hashable], list[str]]:
        """The target's tensors, those together that lie on the same ranks in the same boxes on both sides."""
        kinds: dict[tuple[Hashable, Hashable], list[str]] = defaultdict(list)
        for name in self.target.tensors:
            if name not in self._leave:
                known = name in self.source.tensors
                kinds[self.source.kind(name) if known else name, self.target.kind(name)].append(name)
        return kinds

    def _incoming(self, rank: int) -> tuple[tuple[Copy, ...], tuple[Transfer, ...]]:
        copies: list[Copy] = []
        receives: list[Transfer] = []
        for parameter, shard in self.target.shards(rank).items():
            for piece in shard.pieces:
                if piece.tensor in self._leave:
                    continue
                there = next(place for place in self.target.places(piece.tensor) if place.box == piece.source)
                spot = there.on(rank)
                if (spot.parameter, spot.at) != (parameter, piece.target):
                    copies.append(Copy(piece.tensor, spot.parameter, spot.at, parameter, piece.target, of_target=True))
                    continue
                for here, common in self._overlaps(self.source, piece.tensor, piece.source):
                    at = translate_box(common, piece.source, piece.target)
                    relation, turn = self._relation(here.ranks, there.ranks), self.position(piece.tensor)
                    sender = relation.source_of(rank, turn)
                    if sender == rank:
                        own = here.on(rank)
                        source_at = translate_box(common, here.box, own.at)
                        copies.append(Copy(piece.tensor, own.parameter, source_at, parameter, at))
                    else:
                        forwarded = relation.forwarded(rank, turn)
                        receives.append(Transfer(sender, piece.tensor, common, parameter, at, forwarded))
        return tuple(copies), self._ordered(receives)

    def _outgoing(self, rank: int) -> tuple[Transfer, ...]:
        sends: list[Transfer] = []
        for here, spot, tensor in self._own(self.source, rank):
            for there, common in self._overlaps(self.target, tensor, here.box):
                relation, at = self._relation(here.ranks, there.ranks), translate_box(common, here.box, spot.at)
                for peer in relation.served_by(rank, self.position(tensor)):
                    sends.append(Transfer(peer, tensor, common, spot.parameter, at, forwarded=False))
        for there, spot, tensor in self._own(self.target, rank):
            for here, common in self._overlaps(self.source, tensor, there.box):
                relation, at = self._relation(here.ranks, there.ranks), translate_box(common, there.box, spot.at)
                if rank not in here.ranks:
                    for peer in relation.relayed_by(rank, self.position(tensor)):
                        sends.append(Transfer(peer, tensor, common, spot.parameter, at, forwarded=True))
        return self._ordered(sends)

    def _own(self, shard_map: ShardMap, rank: int) -> Iterator[tuple[BoxReplicas, BoxLocation, str]]:
        """The boxes that a rank holds, each once, at the spot that all plans speak of."""
        for parameter, shard in shard_map.shards(rank).items():
            for piece in shard.pieces:
                if piece.tensor in self._leave:
                    continue
                place = next(place for place in shard_map.places(piece.tensor) if place.box == piece.source)
                spot = place.on(rank)
                if (spot.parameter, spot.at) == (parameter, piece.target):
                    yield place, spot, piece.tensor

    def _overlaps(self, shard_map: ShardMap, tensor: str, box: Box) -> Iterator[tuple[BoxReplicas, Box]]:
        for place in shard_map.places(tensor):
            if common := intersect(place.box, box):
                yield place, common

    def _relation(self, holders: Ranks, needers: Ranks) -> BoxRouting:
        key = (id(holders), id(needers))  # holdings hand out one object for equal ranks, and keep it
        if key not in self._relations:
            self._relations[key] = BoxRouting(holders, needers, self.node)
        return self._relations[key]

    def _ordered(self, moves: list[Transfer]) -> tuple[Transfer, ...]:
        return tuple(sorted(moves, key=lambda move: (self.position(move.tensor), move.box)))


def plan(source: ShardMap, target: ShardMap, node: int | None = None, leave: frozenset[str] = frozenset()) -> Plan:
    """How every element of `target` comes from `source`, but for the tensors in `leave`, which keep their values.

    `node` is the number of ranks of a node; None: all ranks are on one.
    Raises UserError naming tensor and box where the source lacks elements, has them twice, or is of another shape.
    """
    ranks = max((*source.ranks, *target.ranks)) + 1
    return Plan(source, target, node or ranks, leave)
