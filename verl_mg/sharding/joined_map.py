"""Shard map of several groups of ranks that shard one model in different ways, such as servers of different layouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from verl_mg.models.tensor_index import TensorInfo
from verl_mg.sharding.boxes import Box, Shard
from verl_mg.sharding.shard_map import BoxLocation, BoxReplicas, Ranks, ShardMap


class JoinedShardMap:
    """The shards of all ranks of several shard maps of one model, whose ranks are disjoint."""

    def __init__(self, parts: Sequence[ShardMap]) -> None:
        self._parts = {rank: part for part in parts for rank in part.ranks}
        if len(self._parts) < sum(len(part.ranks) for part in parts):
            raise ValueError("a rank is in two of the shard maps")
        self.ranks: Ranks = tuple(sorted(self._parts))
        self.tensors: Mapping[str, TensorInfo] = parts[0].tensors
        self._maps = tuple(parts)
        self._interned: dict[Ranks, Ranks] = {}

    def shards(self, rank: int) -> Mapping[str, Shard]:
        """Returns the parameters of a rank; empty for a rank without any."""
        return self._parts[rank].shards(rank) if rank in self._parts else {}

    def replicas(self, tensor: str) -> Sequence[BoxReplicas]:
        """Returns the distinct boxes of a tensor in all maps, each with the ranks of all of them."""
        # One box for ranks of several maps: a plan then sends it once to each node, whatever the layouts on it.
        locations: dict[Box, list[BoxLocation]] = defaultdict(list)
        for part in self._maps:
            for item in part.replicas(tensor):
                locations[item.box] += item.locations
        return [self._box_replicas(box, at) for box, at in locations.items()]

    def sharding_key(self, tensor: str) -> Hashable:
        """Returns the keys of all maps: tensors are equal where they are equal in each."""
        return tuple(part.sharding_key(tensor) for part in self._maps)

    def _box_replicas(self, box: Box, locations: Sequence[BoxLocation]) -> BoxReplicas:
        ranks = tuple(sorted({rank for location in locations for rank in location.ranks}))
        ranks = self._interned.setdefault(ranks, ranks)  # equal sets are one object: plans look them up by identity
        positions = {(location.parameter, location.parameter_box) for location in locations}
        if len(positions) == 1:
            return BoxReplicas(box, ranks, (BoxLocation(ranks, *positions.pop()),))
        return BoxReplicas(box, ranks, tuple(locations))
