"""Routes of a box from ranks that have it to ranks that need it, and the choice of the rank that writes it to a file.

Pure arithmetic on rank numbers, the same on every rank.

    a box on ranks 0, 1 (node 0), needed by ranks 4, 5, 6, 7 (node 1), nodes of 4 ranks:

    tensor 0    0 -> 4 (gateway),  4 -> 5, 6, 7
    tensor 1    1 -> 5 (gateway),  5 -> 4, 6, 7     the place of rank 1 on its node, so the same rail
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from verl_mg.sharding.boxes import Box
from verl_mg.sharding.shard_map import Ranks, ShardMap

# The fractional part of the golden ratio, in 32 bits: its multiples fall evenly into any number of bins. With a modulo,
# tensors at equal distances, such as one kind in each layer, could all fall into one.
_GOLDEN, _BITS = 0x9E3779B9, 32


@dataclass(frozen=True)
class Routes:
    """Senders and receivers of a box, for tensors with the same place in the rotation."""

    direct: Mapping[int, int]  # {receiver: the holder that sends to it}
    forwarded: Mapping[int, int]  # {receiver: the gateway of its node, which has received the box itself}

    @cached_property
    def direct_pairs(self) -> npt.NDArray[np.int64]:
        """(n, 2) Holder and receiver of each direct message."""
        return _pairs(self.direct)

    @cached_property
    def forwarded_pairs(self) -> npt.NDArray[np.int64]:
        """(n, 2) Gateway and receiver of each forwarded message."""
        return _pairs(self.forwarded)

    def source_of(self, rank: int) -> int:
        """Returns the rank from which a rank gets the box: itself, where it does not receive it."""
        return self.direct.get(rank, self.forwarded.get(rank, rank))

    @cached_property
    def direct_receivers(self) -> Mapping[int, Sequence[int]]:
        """{holder: the ranks to which it sends}."""
        return _inverse(self.direct)

    @cached_property
    def forwarded_receivers(self) -> Mapping[int, Sequence[int]]:
        """{gateway: the ranks to which it forwards}."""
        return _inverse(self.forwarded)


class BoxRouting:
    """Routes of a box from its holders to the ranks that need it.

    - A rank that has the box takes it from itself.
    - On a node with holders, these serve the other ranks of the node in rotation from tensor to tensor.
    - A node without holders receives the box once: one of its ranks, the gateway, receives it from a holder and
      forwards it to the others. A gateway takes the box always from the same holder, so that a rank talks to few
      ranks of other nodes. Gateways are the ranks at the same places on their node as holders have on theirs (where
      each place has its own network adapter and switch, a message stays on its rail), and take turns.

    Rotations are numbers of tensors. Over many tensors, all that take turns do equal work.
    """

    # Both sets of ranks are in rising order, by which all ranks find the same routes.
    def __init__(self, holders: Ranks, needers: Ranks, ranks_per_node: int) -> None:
        self._receivers: dict[int, list[int]] = defaultdict(list)  # by node, ranks that need the box and have it not
        held = set(holders)
        for rank in needers:
            if rank not in held:
                self._receivers[rank // ranks_per_node].append(rank)
        self._local_holders: dict[int, list[int]] = defaultdict(list)  # by node, where there are receivers
        for rank in holders:
            if rank // ranks_per_node in self._receivers:
                self._local_holders[rank // ranks_per_node].append(rank)
        remote = [node for node in self._receivers if node not in self._local_holders]
        spread = sum(divmod(needers[0], ranks_per_node))  # different boxes of one holder start at different holders
        on_rail: dict[int, list[int]] = defaultdict(list)  # holders by their place on the node
        for rank in holders if remote else ():
            on_rail[rank % ranks_per_node].append(rank)
        self._gateways = {
            node: _gateways(self._receivers[node], holders, on_rail, ranks_per_node, number + spread)
            for number, node in enumerate(remote)
        }
        turns = (*self._local_holders.values(), *self._gateways.values())
        self.turns = tuple(sorted({len(ranks) for ranks in turns} - {1}))
        """Numbers of ranks that take turns, on any of the nodes: equal `places` in these are equal routes."""
        self._routes: dict[tuple[int, ...], Routes] = {}

    def routes(self, rotation: int) -> Routes:
        """Returns the routes of the box in the tensor with this number."""
        key = places(rotation, self.turns)
        if key not in self._routes:
            self._routes[key] = self._routes_at(dict(zip(self.turns, key, strict=True)))
        return self._routes[key]

    def receive_counts(self) -> Iterator[tuple[int, float, float]]:
        """Yields (rank, receptions of the box, of these from another node), as means over rotations."""
        for node, peers in self._receivers.items():
            gateways = self._gateways.get(node, {})
            for rank in peers:
                yield rank, 1.0, 1 / len(gateways) if rank in gateways else 0.0

    def send_counts(self) -> Iterator[tuple[int, float]]:
        """Yields (rank, sends of the box), as means over rotations; a rank may come several times."""
        for node, local in self._local_holders.items():
            for rank in local:
                yield rank, len(self._receivers[node]) / len(local)
        for node, gateways in self._gateways.items():
            for gateway, holder in gateways.items():
                yield holder, 1 / len(gateways)
                yield gateway, (len(self._receivers[node]) - 1) / len(gateways)

    def _routes_at(self, place: Mapping[int, int]) -> Routes:
        direct: dict[int, int] = {}
        forwarded: dict[int, int] = {}
        for node, local in self._local_holders.items():
            first = place.get(len(local), 0)
            for number, rank in enumerate(self._receivers[node], first):
                direct[rank] = local[number % len(local)]
        for node, gateways in self._gateways.items():
            gateway = list(gateways)[place.get(len(gateways), 0)]
            direct[gateway] = gateways[gateway]
            if len(self._receivers[node]) > 1:
                forwarded |= {rank: gateway for rank in self._receivers[node] if rank != gateway}
        return Routes(direct, forwarded)


def places(rotation: int, turns: Sequence[int]) -> tuple[int, ...]:
    """Returns, for each number of ranks that take turns, the index of the one whose turn it is in a tensor."""
    return tuple(_rotate(rotation, size) for size in turns)


def _gateways(
    receivers: Sequence[int], holders: Ranks, on_rail: Mapping[int, Sequence[int]], node: int, first: int
) -> dict[int, int]:
    """Returns the ranks of a node that take turns as its gateway: {gateway: the holder that sends to it}."""
    # One fixed holder for each gateway: a rotation over all of them would connect it to many more ranks of other nodes.
    matching = [rank for rank in receivers if rank % node in on_rail]
    if matching:
        return {rank: on_rail[rank % node][first % len(on_rail[rank % node])] for rank in matching}
    return {
        receivers[(min(on_rail) + turn) % len(receivers)]: holders[(first + turn) % len(holders)]
        for turn in range(min(len(on_rail), len(receivers)))
    }


@dataclass(frozen=True, slots=True)
class WriteAssignment:
    """A box of a tensor that a rank writes when a model is saved."""

    tensor: str  # Hugging Face name of the tensor
    box: Box  # box in the tensor
    parameter: str  # parameter of the rank that contains the box
    parameter_box: Box  # box of the same elements in the parameter


def assign_writes(source: ShardMap, rank: int) -> Iterator[WriteAssignment]:
    """Yields the boxes that a rank writes; all ranks together write each box of the model once."""
    # The ranks that have a box take turns from tensor to tensor.
    for parameter, shard in source.shards(rank).items():
        for piece in shard.pieces:
            replicas = source.replicas(piece.tensor).of(piece.source)
            location = replicas.location_on(rank)
            writer = replicas.ranks[_rotate(source.tensors[piece.tensor].position, len(replicas.ranks))]
            if rank == writer and (location.parameter, location.parameter_box) == (parameter, piece.target):
                yield WriteAssignment(piece.tensor, piece.source, parameter, piece.target)


def _rotate(rotation: int, size: int) -> int:
    """Returns the bin, of `size` bins, into which a multiple of the golden ratio falls."""
    return ((rotation * _GOLDEN) & ((1 << _BITS) - 1)) * size >> _BITS


def _inverse(source_of: Mapping[int, int]) -> dict[int, list[int]]:
    receivers: dict[int, list[int]] = defaultdict(list)
    for receiver, sender in source_of.items():
        receivers[sender].append(receiver)
    return dict(receivers)


def _pairs(source_of: Mapping[int, int]) -> npt.NDArray[np.int64]:
    columns = source_of.values(), source_of.keys()
    return np.stack([np.fromiter(column, np.int64, len(source_of)) for column in columns], axis=1)
