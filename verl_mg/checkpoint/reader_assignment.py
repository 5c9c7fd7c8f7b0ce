"""Assignment of the boxes of a Hugging Face directory to readers: each box is read by one of the ranks that have it.

    file 1                 rank 0 reads all boxes of tensor parallel index 0 in it, rank 1 all of index 1
    file 2                 rank 2, a replica of rank 0, and rank 3
    plan(readers, all)     the boxes move from their readers to the other replicas

Pure arithmetic on the shard map, the same on every rank and for any number of ranks on paper. The price of few open
files is an uneven load, see OVERLOAD: a rank that already has a file open is preferred.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

from verl_mg.models.tensor_index import TensorInfo
from verl_mg.sharding.boxes import Box, Shard, numel
from verl_mg.sharding.shard_map import BoxReplicas, Ranks, Replicas, ShardMap

TENSORS_PER_SHARE = 4
"""A rank reads tensors in groups of at most this part of its share, so that replicas can share a file equally."""
OVERLOAD = 1.25  # a rank that reads a file already is preferred until its load is this multiple of an equal share


class ReaderShardMap:
    """Shard map of the boxes that each rank reads from files: every box of the model is on one rank only.

    Of the ranks that have a box, one that reads its file already is preferred, then the one with the least to read. So
    few ranks open a file, and replicas read different files. Tensors without a file are not read.
    """

    def __init__(self, whole: ShardMap, file_of: Mapping[str, str]) -> None:
        self._whole, self._file_of = whole, file_of
        self.ranks = whole.ranks
        self.tensors: Mapping[str, TensorInfo] = whole.tensors
        # For each file, the ranks that open it and the number of elements that each of them reads.
        self.elements: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self._group_of: dict[str, int] = {}
        groups = self._groups()
        for number, names in enumerate(groups):
            self._group_of |= dict.fromkeys(names, number)
        self._readers = self._assign(groups)

    def shards(self, rank: int) -> dict[str, Shard]:
        """Returns the rank's parameters with the pieces that it reads; parameters without such pieces are left out."""
        read = {}
        for name, shard in self._whole.shards(rank).items():
            pieces = tuple(p for p in shard.pieces if self._reader(p.tensor, p.source) == rank)
            if pieces:
                read[name] = replace(shard, pieces=pieces, padding=())
        return read

    def replicas(self, tensor: str) -> Replicas:
        """Returns the boxes of a tensor, each with its reader as the only rank."""
        if tensor not in self._group_of:
            return Replicas()
        readers = self._readers[self._group_of[tensor]]
        return Replicas(self._of_reader(item, readers[item.box]) for item in self._whole.replicas(tensor))

    def sharding_key(self, tensor: str) -> int:
        """Returns the number of the group of tensors with the same boxes, readers and file; -1 for an unread tensor."""
        return self._group_of.get(tensor, -1)

    def _reader(self, tensor: str, box: Box) -> int | None:
        group = self._group_of.get(tensor)
        return None if group is None else self._readers[group][box][0]

    def _of_reader(self, item: BoxReplicas, reader: Ranks) -> BoxReplicas:
        return BoxReplicas(item.box, reader, (replace(item.location_on(reader[0]), ranks=reader),))

    def _groups(self) -> list[list[str]]:
        """Returns runs of tensors in one file with the same boxes on the same ranks, which get the same readers."""
        elements = {name: prod(info.shape) for name, info in self.tensors.items() if name in self._file_of}
        # Readers are chosen for groups and not for tensors, so that plans have one key for a group.
        limit = sum(elements.values()) / (TENSORS_PER_SHARE * len(self.ranks))
        groups: list[list[str]] = []
        open_groups: dict[tuple[str, object], tuple[list[str], int]] = {}
        for name in sorted(elements, key=lambda name: self.tensors[name].position):
            key = (self._file_of[name], self._whole.sharding_key(name))
            names, size = open_groups.get(key, ([], 0))
            if not names or size + elements[name] > limit:
                names, size = [], 0
                groups.append(names)
            names.append(name)
            open_groups[key] = (names, size + elements[name])
        return groups

    def _assign(self, groups: Sequence[Sequence[str]]) -> list[dict[Box, Ranks]]:
        """Returns the reader of each box of each group."""
        by_file: dict[str, list[tuple[int, BoxReplicas, int]]] = defaultdict(list)
        for number, names in enumerate(groups):
            for item in self._whole.replicas(names[0]):
                by_file[self._file_of[names[0]]].append((number, item, numel(item.box) * len(names)))
        assigned: list[dict[Box, Ranks]] = [{} for _ in groups]
        total = sum(size for items in by_file.values() for _, _, size in items)
        load = dict.fromkeys(self.ranks, 0)
        interned = {rank: (rank,) for rank in self.ranks}  # plans look equal sets of ranks up by identity
        for file, items in by_file.items():
            elements = self.elements[file]
            # Boxes with few replicas first: their ranks have to open the file in any case.
            for number, item, size in sorted(items, key=lambda entry: len(entry[1].ranks)):
                reader = _least_loaded(item.ranks, elements, load, OVERLOAD * total / len(self.ranks) - size)
                elements[reader] += size
                load[reader] += size
                assigned[number][item.box] = interned[reader]
        return assigned


def _least_loaded(holders: Ranks, readers: Collection[int], load: Mapping[int, int], limit: float) -> int:
    """Returns the holder with the least load, of those that read the file already if they have not too much to read."""
    # Without a limit, the first rank to open a file would read all of it.
    already = [rank for rank in holders if rank in readers and load[rank] <= limit]
    return min(already or holders, key=lambda rank: (load[rank], rank))
