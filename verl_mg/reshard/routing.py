"""Routes of a box from ranks that have it to ranks that need it, and the choice of the rank that writes it to a file.

Pure arithmetic on rank numbers, the same on every rank.

    a box on ranks 0, 1 (node 0), needed by ranks 4, 5, 6, 7 (node 1), nodes of 4 ranks:

    tensor 0    0 -> 4 (gateway),  4 -> 5, 6, 7
    tensor 1    1 -> 5 (gateway),  5 -> 4, 6, 7     the place of rank 1 on its node, so the same rail
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from verl_mg.sharding.boxes import Box
from verl_mg.sharding.shard_map import ShardMap

# The fractional part of the golden ratio, in 32 bits: its multiples fall evenly into any number of bins. With a modulo,
# tensors at equal distances, such as one kind in each layer, could all fall into one.
_GOLDEN, _BITS = 0x9E3779B9, 32

IntArray = npt.NDArray[np.int64]
Sizes = TypeVar("Sizes", int, IntArray)


@dataclass(frozen=True)
class Routes:
    """Senders and receivers of a box, for tensors with the same place in the rotation."""

    receivers: IntArray  # (n,) ranks that receive the box, in rising order
    senders: IntArray  # (n,) the rank from which each receives it
    # (n,) whether that is the gateway of its node, which has received the box itself, and no holder
    is_forwarded: npt.NDArray[np.bool_]
    _receivers_of: dict[int, Sequence[int]] = field(default_factory=dict)

    @cached_property
    def direct_pairs(self) -> IntArray:
        """(n, 2) Holder and receiver of each direct message."""
        return self._pairs(~self.is_forwarded)

    @cached_property
    def forwarded_pairs(self) -> IntArray:
        """(n, 2) Gateway and receiver of each forwarded message."""
        return self._pairs(self.is_forwarded)

    @cached_property
    def messages(self) -> tuple[IntArray, IntArray]:
        """(n,) Ranks that send or receive; (2, n) how many direct and how many forwarded messages each has."""
        size = 1 + int(np.maximum(self.receivers, self.senders).max(initial=-1))
        pairs = self.direct_pairs, self.forwarded_pairs
        counts = np.array([np.bincount(kind.ravel(), minlength=size) for kind in pairs])
        ranks = np.flatnonzero(counts.any(0))
        return ranks, counts[:, ranks]

    def source_of(self, rank: int) -> tuple[int, bool]:
        """Returns from which rank a rank gets the box, itself where it does not receive it, and if that forwards it."""
        at = int(self.receivers.searchsorted(rank))
        if at == len(self.receivers) or self.receivers[at] != rank:
            return rank, False
        return int(self.senders[at]), bool(self.is_forwarded[at])

    def receivers_of(self, rank: int) -> Sequence[int]:
        """Returns the ranks to which a rank sends the box: directly, if it is a holder, or as the gateway."""
        if rank not in self._receivers_of:
            self._receivers_of[rank] = self.receivers[self.senders == rank].tolist()
        return self._receivers_of[rank]

    def _pairs(self, chosen: npt.NDArray[np.bool_]) -> IntArray:
        return np.array([self.senders[chosen], self.receivers[chosen]]).T


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

    # Arrays over receivers and their nodes, since a job of thousands of ranks has hundreds of routings of thousands
    # of ranks. Both sets of ranks are in rising order, by which all ranks find the same routes.
    def __init__(self, holders: npt.ArrayLike, needers: npt.ArrayLike, ranks_per_node: int) -> None:
        held_by, needed_by = np.asarray(holders, np.int64), np.asarray(needers, np.int64)
        at = np.minimum(held_by.searchsorted(needed_by), len(held_by) - 1)
        self._receivers: IntArray = needed_by[held_by[at] != needed_by]
        node_numbers = self._receivers // ranks_per_node
        is_first = np.diff(node_numbers, prepend=-1) != 0
        self._first = np.flatnonzero(is_first)  # of each node with receivers
        self._count = np.diff(self._first, append=len(node_numbers))
        nodes = node_numbers[self._first]
        self._node_of = np.cumsum(is_first) - 1  # each receiver's node, as an index
        # On each node with receivers, the ranks that take turns to serve it: its holders, or else its gateways.
        begin, end = (held_by.searchsorted((nodes + step) * ranks_per_node) for step in (0, 1))
        self._is_remote = begin == end
        spread = sum(divmod(int(needed_by[0]), ranks_per_node))  # boxes of one holder start at different holders
        gateways, holder_of, of_node = self._gateways(held_by, ranks_per_node, spread)
        entries = np.bincount(of_node, minlength=len(nodes))
        self._servers = np.concatenate([held_by, gateways])
        self._entry = np.concatenate([held_by, holder_of])  # from whom a gateway receives
        first_gateway = len(held_by) + np.cumsum(entries) - entries
        self._first_server = np.where(self._is_remote, first_gateway, begin)
        self._servers_of_node = np.where(self._is_remote, entries, end - begin)
        self.turns = tuple(size for size in np.flatnonzero(np.bincount(self._servers_of_node)).tolist() if size > 1)
        """Numbers of ranks that take turns, on any of the nodes: equal `places` in these are equal routes."""
        self._routes: dict[tuple[int, ...], Routes] = {}

    def routes(self, rotation: int) -> Routes:
        """Returns the routes of the box in the tensor with this number."""
        key = places(rotation, self.turns)
        if key not in self._routes:
            self._routes[key] = self._routes_at(rotation)
        return self._routes[key]

    def receive_counts(self) -> Iterator[tuple[int, float, float]]:
        """Yields (rank, receptions of the box, of these from another node), as means over rotations."""
        gateways = np.isin(self._receivers, self._servers) & self._is_remote[self._node_of]
        entering = gateways / self._servers_of_node[self._node_of]
        for rank, share in zip(self._receivers.tolist(), entering.tolist(), strict=True):
            yield rank, 1.0, share

    def send_counts(self) -> Iterator[tuple[int, float]]:
        """Yields (rank, sends of the box), as means over rotations; a rank may come several times."""
        # Each server of a node passes on an equal part of what the node's ranks receive, a gateway all but its own.
        parts = (self._count - self._is_remote) / self._servers_of_node
        for number, (first, size) in enumerate(zip(self._first_server, self._servers_of_node, strict=True)):
            for at in range(first, first + size):
                yield int(self._servers[at]), float(parts[number])
                if self._is_remote[number]:
                    yield int(self._entry[at]), 1 / int(size)

    def _routes_at(self, rotation: int) -> Routes:
        turn = _rotate(rotation, self._servers_of_node)[self._node_of]
        remote, size = self._is_remote[self._node_of], self._servers_of_node[self._node_of]
        number = np.arange(len(self._receivers)) - self._first[self._node_of]
        # The holders of a node serve its receivers one after the other, its gateway serves all.
        at = self._first_server[self._node_of] + np.where(remote, turn, (turn + number) % size)
        senders = self._servers[at]
        is_gateway = senders == self._receivers
        return Routes(self._receivers, np.where(is_gateway, self._entry[at], senders), remote & ~is_gateway)

    def _gateways(self, holders: IntArray, node: int, spread: int) -> tuple[IntArray, IntArray, IntArray]:
        """Returns the gateways of all nodes without holders, the holder that sends to each, and the node's index."""
        # One fixed holder for each gateway: a rotation over all of them would connect it to many more ranks of other
        # nodes.
        start = (np.cumsum(self._is_remote) - 1 + spread)[self._node_of]
        places_of = holders % node
        by_rail, on_rail = holders[np.argsort(places_of, kind="stable")], np.bincount(places_of, minlength=node)
        before, rails = np.cumsum(on_rail) - on_rail, np.flatnonzero(on_rail)
        rail = self._receivers % node
        matching = np.flatnonzero(self._is_remote[self._node_of] & (on_rail[rail] > 0))
        rail = rail[matching]
        rail_holders = by_rail[before[rail] + start[matching] % on_rail[rail]]
        # Nodes whose receivers have no holder on their rail: as many gateways as there are rails with holders.
        without = self._is_remote.copy()
        without[self._node_of[matching]] = False
        number = np.arange(len(self._receivers)) - self._first[self._node_of]
        others = np.flatnonzero(without[self._node_of] & (number < len(rails)))
        of_node, turn = self._node_of[others], number[others]
        rotated = self._first[of_node] + (int(rails[0]) + turn) % self._count[of_node]
        chosen = np.concatenate([matching, rotated])
        order = np.argsort(np.concatenate([self._node_of[matching], of_node]), kind="stable")
        from_holder = np.concatenate([rail_holders, holders[(start[others] + turn) % len(holders)]])
        return (self._receivers[chosen][order], from_holder[order], self._node_of[chosen][order])


def places(rotation: int, turns: Sequence[int]) -> tuple[int, ...]:
    """Returns, for each number of ranks that take turns, the index of the one whose turn it is in a tensor."""
    return tuple(_rotate(rotation, size) for size in turns)


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


def _rotate(rotation: int, size: Sizes) -> Sizes:
    """Returns the bin, of `size` bins, into which a multiple of the golden ratio falls."""
    return ((rotation * _GOLDEN) & ((1 << _BITS) - 1)) * size >> _BITS
