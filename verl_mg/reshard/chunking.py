"""A target cut into chunks of tensors that are moved one after another, so that the staging memory is one chunk."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod

from verl_mg.models.tensor_index import TensorInfo
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.shard_map import ShardMap


@dataclass(frozen=True)
class TensorChunk:
    """Some of the tensors of a shard map, and the parameters that have them; each parameter is in one chunk, whole."""

    number: int
    tensors: Mapping[str, TensorInfo]
    shards_of_chunks: Callable[[int], Sequence[Mapping[str, Shard]]]  # of each rank, by the number of the chunk

    def shards(self, rank: int) -> Mapping[str, Shard]:
        """Returns the rank's parameters of the chunk's tensors; the first chunk also has parameters of padding."""
        return self.shards_of_chunks(rank)[self.number]


def split_into_chunks(
    whole: ShardMap, ranks: Sequence[int], max_elements: int, keep_together: Iterable[Sequence[str]] = ()
) -> list[TensorChunk]:
    """Cuts a shard map into chunks of at most `max_elements` on each of `ranks`, in the order of the tensors.

    The ranks of one engine represent all engines. Tensors that a parameter contains together, and parameters of one
    tensor, stay in one chunk, so the chunks move no more bytes than the whole; a single parameter may be larger than
    `max_elements`. `keep_together`: further sets of tensors for one chunk.
    """
    # Of each set of inseparable tensors, the elements on the ranks that have some: a rank has few of all experts.
    first_of: dict[str, str] = {}  # the first tensor of the set of each tensor
    sets: dict[str, list[str]] = {}
    held = [whole.shards(rank) for rank in ranks]
    for tensors in _inseparable(whole, held, keep_together):
        sets[tensors[0]] = tensors
        first_of |= dict.fromkeys(tensors, tensors[0])
    elements: dict[str, Counter[int]] = defaultdict(Counter)
    for number, shards in enumerate(held):
        for shard in shards.values():
            if shard.pieces:
                elements[first_of[shard.pieces[0].tensor]][number] += prod(shard.shape)
    chunks: list[list[str]] = []
    sizes: Counter[int] = Counter()
    is_full = True
    for first, tensors in sets.items():
        added = elements[first]
        if is_full or any(sizes[number] + more > max_elements for number, more in added.items()):
            chunks.append([])
            sizes = Counter()
        chunks[-1] += tensors
        sizes.update(added)
        is_full = any(sizes[number] > max_elements for number in added)  # a single parameter may be larger
    chunk_of = {name: number for number, tensors in enumerate(chunks) for name in tensors}

    @cache
    def shards_of_chunks(rank: int) -> Sequence[Mapping[str, Shard]]:
        result: list[dict[str, Shard]] = [{} for _ in chunks]
        for name, shard in whole.shards(rank).items():
            result[chunk_of[shard.pieces[0].tensor] if shard.pieces else 0][name] = shard
        return result

    return [
        TensorChunk(number, {name: whole.tensors[name] for name in tensors}, shards_of_chunks)
        for number, tensors in enumerate(chunks)
    ]


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

    by_parameters = (
        [piece.tensor for piece in shard.pieces]
        for shards in held
        for shard in shards.values()
        if len(shard.pieces) > 1
    )
    for first, *others in chain(by_parameters, keep_together):
        together = find(first)
        for name in others:
            root[find(name)] = together
    sets: dict[str, list[str]] = defaultdict(list)
    for name in sorted(whole.tensors, key=lambda name: whole.tensors[name].position):
        sets[find(name)].append(name)
    yield from sets.values()
