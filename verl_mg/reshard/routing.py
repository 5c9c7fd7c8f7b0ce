"""Routes of a box from ranks that have it to ranks that need it, and the choice of the rank that writes it to a file.

Pure arithmetic on rank numbers, the same on every rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from verl_mg.sharding.boxes import Box
from verl_mg.sharding.shard_map import Ranks, ShardMap

# The fractional part of the golden ratio, in 32 bits: its multiples fall evenly into any number of bins.
_GOLDEN, _BITS = 0x9E3779B9, 32
_FILE = -1  # rank number of a file, which needs every box of the model


class BoxRouting:
    """Routes of a box from its holders to the ranks that need it.

    - A rank that has the box takes it from itself.
    - On a node with holders, these serve the other ranks of the node in rotation.
    - A node without holders receives the box once: one of its ranks, the gateway, receives it from a holder and
      forwards it to the others.

    `rotation`, the number of the tensor, rotates holders and gateways, so that over many tensors all do equal work.
    """

    def __init__(self, holders: Ranks, needers: Ranks, ranks_per_node: int) -> None:
        """Groups the ranks by node.

        Args:
            holders: ranks that have the box, in rising order.
            needers: ranks that need the box, in rising order.
            ranks_per_node: consecutive ranks on one node.
        """
        self._ranks_per_node, self.holders = ranks_per_node, holders
        held = set(holders)
        self.receivers: dict[int, list[int]] = defaultdict(list)  # by node, those that do not have the box
        for rank in needers:
            if rank not in held:
                self.receivers[rank // ranks_per_node].append(rank)
        self._local_holders: dict[int, list[int]] = defaultdict(list)  # by node, where there are receivers
        for rank in holders:
            if rank // ranks_per_node in self.receivers:
                self._local_holders[rank // ranks_per_node].append(rank)
        self._nodes_without_holder = [node for node in self.receivers if node not in self._local_holders]

    def source_of(self, rank: int, rotation: int) -> int:
        """Returns the rank from which a rank takes the box.

        Args:
            rank: a rank that needs the box.
            rotation: number of the tensor.

        Returns:
            The sender, or `rank` itself where it has the box.
        """
        node = rank // self._ranks_per_node
        peers = self.receivers.get(node, [])
        if rank not in peers:
            return rank
        if local := self._local_holders.get(node):
            return local[(_rotate(rotation, len(local)) + peers.index(rank)) % len(local)]
        gateway = self._gateway(node, rotation)
        if rank != gateway:
            return gateway
        offset = _rotate(rotation, len(self.holders)) + self._nodes_without_holder.index(node)
        return self.holders[offset % len(self.holders)]

    def forwarded(self, rank: int, rotation: int) -> bool:
        """Returns whether a rank receives the box from its node's gateway instead of a holder.

        Args:
            rank: a rank that needs the box and does not have it.
            rotation: number of the tensor.
        """
        node = rank // self._ranks_per_node
        return node not in self._local_holders and rank != self._gateway(node, rotation)

    def send_targets(self, rank: int, rotation: int) -> Iterator[int]:
        """Yields the ranks to which a holder sends the box.

        Args:
            rank: a rank that has the box.
            rotation: number of the tensor.
        """
        node = rank // self._ranks_per_node
        local = self._local_holders.get(node, [])
        if local:
            first = (local.index(rank) - _rotate(rotation, len(local))) % len(local)
            yield from self.receivers[node][first :: len(local)]
        if self._nodes_without_holder:
            first = (self.holders.index(rank) - _rotate(rotation, len(self.holders))) % len(self.holders)
            for remote in self._nodes_without_holder[first :: len(self.holders)]:
                yield self._gateway(remote, rotation)

    def forward_targets(self, rank: int, rotation: int) -> list[int]:
        """Returns the ranks to which a gateway forwards the box; empty for other ranks.

        Args:
            rank: a rank that needs the box and does not have it.
            rotation: number of the tensor.
        """
        node = rank // self._ranks_per_node
        if node in self._local_holders or rank != self._gateway(node, rotation):
            return []
        return [peer for peer in self.receivers[node] if peer != rank]

    def receive_counts(self) -> Iterator[tuple[int, float, float]]:
        """Yields (rank, receptions of the box, of these from another node), as means over rotations."""
        for node, peers in self.receivers.items():
            inter_node = 0.0 if node in self._local_holders else 1.0 / len(peers)
            for rank in peers:
                yield rank, 1.0, inter_node

    def send_counts(self) -> Iterator[tuple[int, float]]:
        """Yields (rank, sends of the box), as means over rotations; a rank may come several times."""
        for node, local in self._local_holders.items():
            for rank in local:
                yield rank, len(self.receivers[node]) / len(local)
        if self._nodes_without_holder:
            for rank in self.holders:
                yield rank, len(self._nodes_without_holder) / len(self.holders)
        for node in self._nodes_without_holder:
            peers = self.receivers[node]
            for rank in peers:
                yield rank, (len(peers) - 1) / len(peers)

    def _gateway(self, node: int, rotation: int) -> int:
        peers = self.receivers[node]
        return peers[_rotate(rotation, len(peers))]


@dataclass(frozen=True, slots=True)
class WriteAssignment:
    """A box of a tensor that a rank writes when a model is saved."""

    tensor: str
    """Hugging Face name of the tensor."""
    box: Box
    """Box in the tensor."""
    parameter: str
    """Parameter of the rank that contains the box."""
    parameter_box: Box
    """Box of the same elements in the parameter."""


def assign_writes(source: ShardMap, rank: int) -> Iterator[WriteAssignment]:
    """Yields the boxes that a rank writes; all ranks together write each box of the model once.

    The ranks that have a box take turns from tensor to tensor.

    Args:
        source: shards of all ranks.
        rank: global rank.
    """
    for parameter, shard in source.shards(rank).items():
        for piece in shard.pieces:
            replicas = next(item for item in source.replicas(piece.tensor) if item.box == piece.source)
            location = replicas.location_on(rank)
            # A file is a receiver on a node without holders.
            routing = BoxRouting(replicas.ranks, (_FILE,), ranks_per_node=1)
            writer = routing.source_of(_FILE, source.tensors[piece.tensor].position)
            if rank == writer and (location.parameter, location.parameter_box) == (parameter, piece.target):
                yield WriteAssignment(piece.tensor, piece.source, parameter, piece.target)


def _rotate(rotation: int, size: int) -> int:
    """Returns the bin, of `size` bins, into which a multiple of the golden ratio falls."""
    return ((rotation * _GOLDEN) & ((1 << _BITS) - 1)) * size >> _BITS
