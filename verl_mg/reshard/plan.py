"""Plan of the boxes that move from rank to rank: the intersections of the boxes of two shard maps.

- Pure: every rank derives its sends and receives from the two shard maps, without communication.
- A rank receives exactly the elements that it needs and does not have, each once: the lower bound of bytes.
- Each element of the target has one source, or planning fails with the tensor and the box.

    tensor t (4, 2), source w cut by rows, target v cut by columns, on ranks 0 and 1:

    w on rank 0: t rows 0:2     v on rank 0: t column 0
    w on rank 1: t rows 2:4     v on rank 1: t column 1

    rank 0   copy      t rows 0:2, column 0    w (0:2, 0:1) -> v (0:2, 0:1)
             send      t rows 0:2, column 1    w (0:2, 1:2) -> rank 1
             receive   t rows 2:4, column 0    rank 1       -> v (2:4, 0:1)
    rank 1   the same with the ranks exchanged

Each rank receives 2 elements: 4 that it needs, less 2 that it has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from verl_mg.errors import UserError
from verl_mg.layout import EnginePlacement
from verl_mg.reshard.epochs import EpochCutter, Epochs, Flow, Pattern, Patterns
from verl_mg.reshard.routing import BoxRouting, IntArray
from verl_mg.sharding.boxes import Box, Shard, full_box, intersect, numel, translate_box, uncovered
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.shard_map import BoxReplicas, Ranks, Replicas, ShardMap


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box that a rank sends to another rank or receives from it."""

    peer: int  # the other global rank
    tensor: str
    box: Box  # box in the tensor
    parameter: str  # parameter of this rank that contains the box
    parameter_box: Box  # box of the same elements in that parameter
    forwarded: bool  # whether the sender received the box for its own target shard, and sends it from there


@dataclass(frozen=True, slots=True)
class Copy:
    """A box that a rank copies within its own memory."""

    tensor: str  # Hugging Face name of the tensor
    source: str  # parameter that is read
    source_box: Box  # box in the parameter that is read
    target: str  # target parameter that is written
    target_box: Box  # box in the target parameter
    # Whether `source` is a target parameter too: the rank needs the box twice, and has received it once.
    from_target: bool = False


@dataclass(frozen=True)
class RankPlan:
    """All copies, sends and receives of one rank."""

    copies: tuple[Copy, ...]  # copies within the rank, in the order of the target's parameters
    sends: tuple[Transfer, ...]  # boxes to send, in the order of the tensors
    receives: tuple[Transfer, ...]  # boxes to receive, in the order of the tensors
    source_shapes: Mapping[str, tuple[int, ...]]  # shapes of the rank's source parameters
    target_shapes: Mapping[str, tuple[int, ...]]  # shapes of the rank's target parameters

    def of(self, tensors: Iterable[str]) -> RankPlan:
        """Returns the moves of some tensors, in the same order, and all shapes."""
        numbers: tuple[list[int], list[int], list[int]] = [], [], []
        for tensor in tensors:
            for chosen, more in zip(numbers, self._numbers.get(tensor, ()), strict=False):
                chosen += more
        copies, sends, receives = map(sorted, numbers)
        return RankPlan(
            tuple(self.copies[number] for number in copies),
            tuple(self.sends[number] for number in sends),
            tuple(self.receives[number] for number in receives),
            self.source_shapes,
            self.target_shapes,
        )

    @cached_property
    def _numbers(self) -> Mapping[str, tuple[list[int], list[int], list[int]]]:
        """The numbers of copies, sends and receives of each tensor."""
        result: dict[str, tuple[list[int], list[int], list[int]]] = defaultdict(lambda: ([], [], []))
        every_kind: tuple[Sequence[Copy | Transfer], ...] = (self.copies, self.sends, self.receives)
        for kind, moves in enumerate(every_kind):
            for number, move in enumerate(moves):
                result[move.tensor][kind].append(number)
        return result


@dataclass
class RankTraffic:
    """Bytes of one rank in one execution of a plan."""

    received: int = 0  # bytes received over the wire
    entered: float = 0.0  # bytes received from other nodes; a mean over rotations
    sent: float = 0.0  # bytes sent; a mean over rotations
    lower_bound: int = 0  # bytes that the rank needs and does not have


class Plan:
    """All moves from one shard map to another; each rank derives its part without communication."""

    def __init__(self, source: ShardMap, target: ShardMap, ranks_per_node: int, keep: frozenset[str]) -> None:
        """Checks the two shard maps.

        Args:
            source: shards that are read.
            target: shards that are written.
            ranks_per_node: consecutive ranks on one node.
            keep: tensors of the target that keep their values.

        Raises:
            UserError: the source does not cover the target exactly once; names tensor and box.
        """
        self.source, self.target, self.ranks_per_node, self._keep = source, target, ranks_per_node, keep
        # A model has far fewer pairs of sets of ranks than boxes: routes are computed once for each pair.
        self._routings: dict[tuple[int, int], BoxRouting] = {}
        self._arrays: dict[int, IntArray] = {}  # sets of ranks by identity
        self._sources: dict[tuple[str, Box], list[tuple[Box, BoxReplicas, BoxRouting]]] = {}
        self._targets: dict[tuple[str, Box], list[tuple[Box, BoxReplicas, BoxRouting]]] = {}
        self._rank_plans: dict[int, RankPlan] = {}
        self._cutters: dict[int, EpochCutter] = {}
        self._epochs: dict[tuple[int, int, tuple[str, ...] | None], Epochs] = {}
        _check(source, target, [names[0] for names in self._tensors_by_key.values()])

    def rank_plan(self, rank: int) -> RankPlan:
        """Returns the moves of one global rank; empty for a rank with neither source nor target."""
        if rank not in self._rank_plans:
            self._rank_plans[rank] = self._moves_of(rank)
        return self._rank_plans[rank]

    def lower_bound(self, rank: int, itemsize: int) -> int:
        """Returns the bytes that a rank needs and does not have; no method can transfer fewer.

        Args:
            rank: global rank.
            itemsize: bytes of an element on the wire, except for tensors that have their own dtype.
        """
        needed: dict[str, set[Box]] = defaultdict(set)
        for shard in self.target.shards(rank).values():
            for piece in shard.pieces:
                needed[piece.tensor].add(piece.source)
        total = 0
        for tensor in needed.keys() - self._keep:
            for box in needed[tensor]:
                local = sum(numel(common) for common, src, _ in self._sources_of(tensor, box) if rank in src.ranks)
                total += (numel(box) - local) * self.itemsize(tensor, itemsize)
        return total

    def traffic(self, itemsize: int) -> dict[int, RankTraffic]:
        """Returns the bytes of every rank of source and target.

        Args:
            itemsize: bytes of an element on the wire, except for tensors that have their own dtype.
        """
        moved: dict[BoxRouting, int] = defaultdict(int)
        needed: dict[Ranks, int] = defaultdict(int)
        held: dict[tuple[Ranks, Ranks], int] = defaultdict(int)
        # Counted once for all tensors with the same boxes on the same ranks, and over sets of ranks instead of ranks.
        for names in self._tensors_by_key.values():
            scale = len(names) * self.itemsize(names[0], itemsize)
            sources, targets = self.source.replicas(names[0]), self.target.replicas(names[0])
            for dst in targets:
                needed[dst.ranks] += numel(dst.box) * scale
                for src, common in sources.overlaps(dst.box):
                    moved[self._routing(src.ranks, dst.ranks)] += numel(common) * scale
                    held[src.ranks, dst.ranks] += numel(common) * scale
        ranks = {rank: RankTraffic() for rank in sorted({*self.source.ranks, *self.target.ranks})}
        for routing, size in moved.items():
            for rank, received, inter_node in routing.receive_counts():
                ranks[rank].received += int(received) * size
                ranks[rank].entered += inter_node * size
            for rank, sent in routing.send_counts():
                ranks[rank].sent += sent * size
        for needers, size in needed.items():
            for rank in needers:
                ranks[rank].lower_bound += size
        for (holders, needers), size in held.items():
            for rank in set(holders).intersection(needers):
                ranks[rank].lower_bound -= size
        return ranks

    def itemsize(self, tensor: str, itemsize: int) -> int:
        """Returns the bytes of an element of a tensor on the wire.

        Args:
            tensor: Hugging Face name.
            itemsize: bytes of an element of tensors that have the dtype of the model.
        """
        return self.source.tensors[tensor].itemsize(itemsize)

    def position(self, tensor: str) -> int:
        """Returns the position of a tensor in the order in which tensors are moved."""
        return self.source.tensors[tensor].position

    def epochs(self, itemsize: int, bucket_bytes: int, tensors: Collection[str] | None = None) -> Epochs:
        """Returns the epochs in which the tensors travel, the same for all ranks.

        Args:
            itemsize: bytes of an element on the wire, except for tensors that have their own dtype.
            bucket_bytes: bytes that a rank may send and receive in an epoch.
            tensors: those that travel; None: all.
        """
        key = itemsize, bucket_bytes, None if tensors is None else tuple(tensors)
        if key not in self._epochs:
            if bucket_bytes not in self._cutters:
                self._cutters[bucket_bytes] = EpochCutter(self._patterns.values(), bucket_bytes)
            patterns, infos = self._patterns, self.source.tensors
            names = patterns if tensors is None else sorted(patterns.keys() & tensors, key=lambda n: infos[n].position)
            rows = ((name, patterns[name], infos[name].itemsize(itemsize)) for name in names)
            self._epochs[key] = self._cutters[bucket_bytes].cut(rows)
        return self._epochs[key]

    def peers(self) -> dict[int, set[int]]:
        """Returns the ranks with which each rank exchanges messages, for all ranks of source and target."""
        peers: dict[int, set[int]] = {rank: set() for rank in sorted({*self.source.ranks, *self.target.ranks})}
        for pattern in dict.fromkeys(self._patterns.values()):
            for pairs in (*pattern.direct, *pattern.forwarded):
                for sender, receiver in pairs.tolist():
                    peers[sender].add(receiver)
                    peers[receiver].add(sender)
        return peers

    @cached_property
    def _patterns(self) -> Mapping[str, Pattern]:
        """The tensors that move, in the common order, and who sends to whom."""
        by_name: dict[str, Pattern] = {}
        alike: dict[tuple[Flow, ...], Patterns] = {}
        infos = self.source.tensors
        for names in self._tensors_by_key.values():
            sources, targets = self.source.replicas(names[0]), self.target.replicas(names[0])
            flows = tuple(
                Flow(common, self._routing(src.ranks, dst.ranks))
                for dst in targets
                for src, common in sources.overlaps(dst.box)
            )
            if flows not in alike:
                alike[flows] = Patterns(flows)
            by_name |= alike[flows].of({name: infos[name].position for name in names})
        return {name: by_name[name] for name in sorted(by_name, key=lambda name: infos[name].position)}

    @cached_property
    def _tensors_by_key(self) -> dict[tuple[Hashable, Hashable], list[str]]:
        """The target's tensors, grouped by equal boxes on equal ranks on both sides."""
        groups: dict[tuple[Hashable, Hashable], list[str]] = defaultdict(list)
        for name in self.target.tensors:
            if name not in self._keep:
                source_key = self.source.sharding_key(name) if name in self.source.tensors else name
                groups[source_key, self.target.sharding_key(name)].append(name)
        return groups

    @cached_property
    def _first_like(self) -> Mapping[str, str]:
        """The first tensor of the group of each."""
        return {name: names[0] for names in self._tensors_by_key.values() for name in names}

    def _moves_of(self, rank: int) -> RankPlan:
        copies: list[Copy] = []
        sends: list[Transfer] = []
        receives: list[Transfer] = []
        sources, targets = self.source.shards(rank), self.target.shards(rank)
        held, needed = self._places(self.source, sources, rank), self._places(self.target, targets, rank)
        for (tensor, box), (parameter, at) in held.items():
            for common, _, routing in self._targets_of(tensor, box):
                if peers := routing.routes(self.position(tensor)).receivers_of(rank):
                    source_box = translate_box(common, box, at)
                    sends += [Transfer(peer, tensor, common, parameter, source_box, forwarded=False) for peer in peers]
        for parameter, shard in targets.items():
            for piece in shard.pieces:
                tensor, box = piece.tensor, piece.source
                if tensor in self._keep:
                    continue
                # A box that a rank needs at two places arrives at the first one only; the other is a copy.
                first = needed[tensor, box]
                if first != (parameter, piece.target):
                    copies.append(Copy(tensor, *first, parameter, piece.target, from_target=True))
                    continue
                for common, src, routing in self._sources_of(tensor, box):
                    target_box = translate_box(common, box, piece.target)
                    routes = routing.routes(self.position(tensor))
                    sender, forwarded = routes.source_of(rank)
                    if sender == rank:
                        name, at = held[tensor, src.box]
                        copies.append(Copy(tensor, name, translate_box(common, src.box, at), parameter, target_box))
                        continue
                    receives.append(Transfer(sender, tensor, common, parameter, target_box, forwarded))
                    # A rank that receives the box is no holder: it sends it on where it is the gateway of its node.
                    for peer in routes.receivers_of(rank):
                        sends.append(Transfer(peer, tensor, common, parameter, target_box, forwarded=True))
        return RankPlan(
            tuple(copies),
            self._ordered(sends),
            self._ordered(receives),
            {name: shard.shape for name, shard in sources.items()},
            {name: shard.shape for name, shard in targets.items()},
        )

    def _places(
        self, shard_map: ShardMap, shards: Mapping[str, Shard], rank: int
    ) -> dict[tuple[str, Box], tuple[str, Box]]:
        """Returns where a rank has each of its boxes: {(tensor, box): (parameter, box in it)}, the first of several."""
        places: dict[tuple[str, Box], tuple[str, Box]] = {}
        for parameter, shard in shards.items():
            for piece in shard.pieces:
                if piece.tensor in self._keep:
                    continue
                place = piece.tensor, piece.source
                if place in places:  # the first one is that of the replicas, which all plans use
                    location = shard_map.replicas(piece.tensor).of(piece.source).location_on(rank)
                    places[place] = location.parameter, location.parameter_box
                else:
                    places[place] = parameter, piece.target
        return places

    # Tensors of a group have the same boxes on the same ranks: they are looked up once, in the first of them.

    def _sources_of(self, tensor: str, box: Box) -> list[tuple[Box, BoxReplicas, BoxRouting]]:
        """Returns the boxes of the source within a box of the target: (common box, source box, routing)."""
        key = first, _ = self._first_like[tensor], box
        if key not in self._sources:
            needers = self.target.replicas(first).of(box).ranks
            overlaps = self.source.replicas(first).overlaps(box)
            self._sources[key] = [(common, src, self._routing(src.ranks, needers)) for src, common in overlaps]
        return self._sources[key]

    def _targets_of(self, tensor: str, box: Box) -> list[tuple[Box, BoxReplicas, BoxRouting]]:
        """Returns the boxes of the target within a box of the source: (common box, target box, routing)."""
        if tensor not in self._first_like:
            return []
        key = first, _ = self._first_like[tensor], box
        if key not in self._targets:
            holders = self.source.replicas(first).of(box).ranks
            overlaps = self.target.replicas(first).overlaps(box)
            self._targets[key] = [(common, dst, self._routing(holders, dst.ranks)) for dst, common in overlaps]
        return self._targets[key]

    def _routing(self, holders: Ranks, needers: Ranks) -> BoxRouting:
        key = (id(holders), id(needers))  # shard maps return one object for equal ranks, and keep it
        if key not in self._routings:
            for ranks in (holders, needers):
                if id(ranks) not in self._arrays:
                    self._arrays[id(ranks)] = np.array(ranks)
            arrays = self._arrays[id(holders)], self._arrays[id(needers)]
            self._routings[key] = BoxRouting(*arrays, self.ranks_per_node)
        return self._routings[key]

    def _ordered(self, moves: list[Transfer]) -> tuple[Transfer, ...]:
        # By tensor and box, which both ends of a message know: so the segments of a message match.
        return tuple(sorted(moves, key=lambda move: (self.position(move.tensor), move.box, move.peer)))


def plan(
    source: ShardMap, target: ShardMap, ranks_per_node: int | None = None, keep: frozenset[str] = frozenset()
) -> Plan:
    """Plans how every element of the target comes from the source.

    Args:
        source: shards that are read.
        target: shards that are written.
        ranks_per_node: consecutive ranks on one node; None: all ranks are on one node.
        keep: tensors of the target that keep their values.

    Raises:
        UserError: the source does not have elements, has them twice, or has a tensor of another shape; names tensor and
            box.
    """
    ranks = max((*source.ranks, *target.ranks)) + 1
    return Plan(source, target, ranks_per_node or ranks, keep)


def best_stride(
    source: ShardMap, table: ModelTable, placement: EnginePlacement, ranks_per_node: int
) -> EnginePlacement:
    """Returns the engine placement whose stride moves the fewest bytes; the smallest stride of equally good ones.

    HybridFlow (arXiv:2409.19256, section 5.3) groups ranks so that each has its generation shard among its own
    training shards; SGLang's engines allow that with `base_gpu_id` and `gpu_id_step`.

    Args:
        source: shards of the training ranks.
        table: weight table of the model.
        placement: layout and ranks of the engines.
        ranks_per_node: consecutive ranks on one node.
    """

    def bytes_received(candidate: EnginePlacement) -> int:
        # Bytes of a bf16 element: only the order of the candidates matters.
        traffic = plan(source, table.shard_map_engine(candidate), ranks_per_node).traffic(itemsize=2)
        return sum(rank.received for rank in traffic.values())

    candidates = list(placement.strides(ranks_per_node))
    return min(candidates, key=bytes_received) if len(candidates) > 1 else placement


def _check(source: ShardMap, target: ShardMap, tensors: Iterable[str]) -> None:
    """Raises UserError with tensor and box for the first tensor that the source does not cover exactly once."""
    if source.tensors is not target.tensors:  # usually one object: both maps come from one table
        _check_same_shapes(source, target)
    valid: set[tuple[tuple[Box, ...], tuple[Box, ...]]] = set()
    for name in tensors:
        needed, held = target.replicas(name), source.replicas(name)
        boxes = tuple(item.box for item in held), tuple(item.box for item in needed)
        if boxes in valid:  # another tensor with the same boxes; names make no difference
            continue
        _check_disjoint(name, "source", held)
        _check_disjoint(name, "target", needed)
        for item in needed:
            shape = target.tensors[name].shape
            if len(item.box) != len(shape) or intersect(item.box, full_box(shape)) != item.box:
                raise UserError(f"{name}: the box {item.box} of the target is outside the tensor's shape {shape}.")
            if missing := uncovered(item.box, [common for _, common in held.overlaps(item.box)]):
                raise UserError(
                    f"{name}: the box {missing[0]}, which rank {item.ranks[0]} needs for "
                    f"{item.locations[0].parameter}, is missing in the source."
                )
        valid.add(boxes)


def _check_same_shapes(source: ShardMap, target: ShardMap) -> None:
    for name, info in target.tensors.items():
        other = source.tensors.get(name)
        if other is not None and other.shape != info.shape:
            raise UserError(
                f"{name}: the shape is {other.shape} in the source and {info.shape} in the target. "
                "Use two shardings of one model."
            )


def _check_disjoint(name: str, side: str, replicas: Replicas) -> None:
    for a in replicas:
        for b, common in replicas.overlaps(a.box):
            # Target boxes may overlap on different ranks, as with servers of several layouts. In a source they may not:
            # the values of an element could differ.
            if b is not a and (side == "source" or set(a.ranks).intersection(b.ranks)):
                raise UserError(f"{name}: the box {common} is in the {side} twice, in {a.box} and in {b.box}.")
