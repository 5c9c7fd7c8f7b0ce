"""A target cut into chunks of tensors that are moved one after another, so that the staging memory is one chunk."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from math import prod

from verl_mg.models.tensor_index import TensorInfo
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.shard_map import Replicas, ShardMap


class TensorChunk:
    """Shard map of some of the tensors of a larger one; each parameter is in it whole or not at all."""

    # `shards` are the shards of `whole`: a function, which caches them for all chunks.
    def __init__(
        self,
        whole: ShardMap,
        shards: Callable[[int], Mapping[str, Shard]],
        tensors: Iterable[str],
        is_first: bool = False,
    ) -> None:
        self._whole, self._shards, self._is_first = whole, shards, is_first
        self.ranks = whole.ranks
        self.tensors: Mapping[str, TensorInfo] = {name: whole.tensors[name] for name in tensors}

    def shards(self, rank: int) -> Mapping[str, Shard]:
        """Returns the rank's parameters of the chunk's tensors; the first chunk also has parameters of padding."""
        return {
            name: shard
            for name, shard in self._shards(rank).items()
            if (shard.pieces[0].tensor in self.tensors if shard.pieces else self._is_first)
        }

    def replicas(self, tensor: str) -> Replicas:
        """Returns the replicas of a tensor of the chunk; empty for other tensors."""
        return self._whole.replicas(tensor) if tensor in self.tensors else Replicas()

    def sharding_key(self, tensor: str) -> Hashable:
        """Returns the key of the whole shard map."""
        return self._whole.sharding_key(tensor)


def split_into_chunks(
    whole: ShardMap, ranks: Sequence[int], max_elements: int, keep_together: Iterable[Sequence[str]] = ()
) -> list[TensorChunk]:
    """Cuts a shard map into chunks of at most `max_elements` on each of `ranks`, in the order of the tensors.

    The ranks of one engine represent all engines. Tensors that a parameter contains together, and parameters of one
    tensor, stay in one chunk, so the chunks move no more bytes than the whole; a single parameter may be larger than
    `max_elements`. `keep_together`: further sets of tensors for one chunk.
    """
    shards_of = cache(whole.shards)
    held = [shards_of(rank) for rank in ranks]
    elements_of = [_elements(shards) for shards in held]
    chunks: list[list[str]] = []
    sizes = [0] * len(held)
    for tensors in _inseparable(whole, held, keep_together):
        added = [sum(count[name] for name in tensors) for count in elements_of]
        if not chunks or any(size + more > max_elements for size, more in zip(sizes, added, strict=True)):
            chunks.append([])
            sizes = [0] * len(held)
        chunks[-1] += tensors
        sizes = [size + more for size, more in zip(sizes, added, strict=True)]
    return [TensorChunk(whole, shards_of, tensors, number == 0) for number, tensors in enumerate(chunks)]


def _inseparable(
    whole: ShardMap, held: Sequence[Mapping[str, Shard]], keep_together: Iterable[Sequence[str]]
) -> Iterator[list[str]]:
    """Yields the sets of tensors that must stay together, in the order of their first tensors."""
    root = {name: name for name in whole.tensors}

    def find(name: str) -> str:
        # Union-find with path halving.
        while root[name] != name:
            root[name] = name = root[root[name]]
        return name

    by_parameters = ([piece.tensor for piece in shard.pieces] for shards in held for shard in shards.values())
    for names in chain(by_parameters, keep_together):
        for name in names[1:]:
            root[find(name)] = find(names[0])
    sets: dict[str, list[str]] = defaultdict(list)
    for name in sorted(whole.tensors, key=lambda name: whole.tensors[name].position):
        sets[find(name)].append(name)
    yield from sets.values()


def _elements(shards: Mapping[str, Shard]) -> Counter[str]:
    """Returns the sizes of parameters under the names of their first tensors."""
    # A parameter counts once: all its tensors are in one chunk.
    count: Counter[str] = Counter()
    for shard in shards.values():
        if shard.pieces:
            count[shard.pieces[0].tensor] += prod(shard.shape)
    return count
