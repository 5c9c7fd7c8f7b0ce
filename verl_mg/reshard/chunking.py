"""A target cut into portions that are moved one after another, so that only one of them stands beside the target."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from math import prod

from verl_mg.models.tensor_index import TensorInfo
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.shard_map import BoxReplicas, ShardMap

Shards = Callable[[int], Mapping[str, Shard]]


class TensorChunk:
    """The holdings of some tensors alone; parameters are in it whole or not at all."""

    def __init__(self, whole: ShardMap, shards: Shards, tensors: Sequence[str]) -> None:
        self._whole, self._shards = whole, shards
        self.ranks = whole.ranks
        self.tensors: Mapping[str, TensorInfo] = {name: whole.tensors[name] for name in tensors}

    def shards(self, rank: int) -> Mapping[str, Shard]:
        """See `ShardMap`."""
        return _only(self._shards(rank), self.tensors)

    def places(self, tensor: str) -> Sequence[BoxReplicas]:
        """See `ShardMap`."""
        return self._whole.places(tensor) if tensor in self.tensors else ()

    def kind(self, tensor: str) -> Hashable:
        """See `ShardMap`."""
        return self._whole.kind(tensor)


def split_into_chunks(
    whole: ShardMap, ranks: Sequence[int], elements: int, tied: Iterable[Sequence[str]] = ()
) -> list[TensorChunk]:
    """Portions of at most `elements` a rank, in the order of the tensors; a parameter alone may be larger.

    `ranks` are those that are measured: one engine's stand for all. Tensors that a parameter holds together, and
    parameters of one tensor, stay together, so the portions move no byte more than the whole. So do the tensors of
    each set in `tied`, though no parameter of `whole` holds them.
    """
    shards_of = cache(whole.shards)
    held = [shards_of(rank) for rank in ranks]
    elements_of = [_elements(shards) for shards in held]
    found: list[list[str]] = []
    sizes = [0] * len(held)
    for tensors in _inseparable(whole, held, tied):
        own = [sum(count[name] for name in tensors) for count in elements_of]
        if not found or any(size + more > elements for size, more in zip(sizes, own, strict=True)):
            found.append([])
            sizes = [0] * len(held)
        found[-1] += tensors
        sizes = [size + more for size, more in zip(sizes, own, strict=True)]
    return [TensorChunk(whole, shards_of, tensors) for tensors in found]


def _inseparable(
    whole: ShardMap, held: Sequence[Mapping[str, Shard]], tied: Iterable[Sequence[str]]
) -> Iterator[list[str]]:
    """The sets of tensors that parameters or `tied` hold together, in the order of their first tensors."""
    root = {name: name for name in whole.tensors}

    def find(name: str) -> str:
        while root[name] != name:
            root[name] = name = root[root[name]]
        return name

    by_parameters = ([piece.tensor for piece in shard.pieces] for shards in held for shard in shards.values())
    for names in chain(by_parameters, tied):
        for name in names[1:]:
            root[find(name)] = find(names[0])
    sets: dict[str, list[str]] = defaultdict(list)
    for name in sorted(whole.tensors, key=lambda name: whole.tensors[name].position):
        sets[find(name)].append(name)
    yield from sets.values()


def _elements(shards: Mapping[str, Shard]) -> Counter[str]:
    """The sizes of parameters, under their first tensors."""
    count: Counter[str] = Counter()
    for shard in shards.values():
        if shard.pieces:
            count[shard.pieces[0].tensor] += prod(shard.shape)
    return count


def _only(shards: Mapping[str, Shard], tensors: Container[str]) -> dict[str, Shard]:
    return {name: shard for name, shard in shards.items() if shard.pieces and shard.pieces[0].tensor in tensors}
