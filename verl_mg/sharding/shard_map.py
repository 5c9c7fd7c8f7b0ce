"""Who holds what: the shards of every rank, and for each tensor the places where its boxes lie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from verl_mg.models.tensor_index import Entry, TensorIndex, TensorInfo
from verl_mg.sharding.boxes import Box, Piece, Shard, check_shard
from verl_mg.sharding.param_spec import Axis, ParamBlock, ParamSpec

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BoxLocation:
    """Where a box stands on some ranks: the parameter, and the box in it."""

    ranks: Ranks
    parameter: str
    at: Box


@dataclass(frozen=True, slots=True)
class BoxReplicas:
    """A box of a tensor, all ranks that hold it in rising order, and where."""

    box: Box
    ranks: Ranks
    spots: tuple[BoxLocation, ...]

    def on(self, rank: int) -> BoxLocation:
        """Where it stands on one of its ranks."""
        return self.spots[0] if len(self.spots) == 1 else next(spot for spot in self.spots if rank in spot.ranks)


class ShardMap(Protocol):
    """The parameters of a set of global ranks; pure data, no process knows another."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that hold anything, rising."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors of the model."""
        ...

    def shards(self, rank: int) -> Mapping[str, Shard]:
        """The parameters of a rank; {} for one that holds none."""
        ...

    def places(self, tensor: str) -> Sequence[BoxReplicas]:
        """The distinct boxes of a tensor, each with all its ranks; () where nobody holds it."""
        ...

    def kind(self, tensor: str) -> Hashable:
        """What the places of a tensor depend on: tensors of one kind lie on the same ranks in the same boxes."""
        ...


@dataclass(frozen=True)
class ParallelIndex:
    """Where a rank stands: its stage, its group of experts, its index on each axis."""

    stage: int
    experts: int
    index: Mapping[Axis, int]


class DerivedShardMap:
    """Holdings by a dialect: sections of weights on stages, cut along axes."""

    def __init__(
        self,
        tensor_index: TensorIndex,
        stages: Sequence[Sequence[ParamBlock]],
        sizes: Mapping[Axis, int],
        local_experts: int,
        seats: Mapping[int, ParallelIndex],
    ) -> None:
        self._catalogue, self._stages, self._sizes, self._seats = tensor_index, stages, sizes, seats
        self._local_experts = local_experts
        self.ranks = tuple(sorted(seats))
        self.tensors: Mapping[str, TensorInfo] = tensor_index.tensors
        self._templates: dict[tuple[ParamSpec, int], Shard] = {}
        self._homes: dict[tuple[str, int | None], list[tuple[int, str, ParamSpec]]] = defaultdict(list)
        for stage, sections in enumerate(stages):
            for section in sections:
                for weight in section.weights:
                    for source in weight.sources:
                        self._homes[source.name, section.layer].append((stage, section.prefix, weight))
        self._stages_of = {key: tuple(stage for stage, *_ in homes) for key, homes in self._homes.items()}
        seated: dict[tuple[int, Axis, int, int], list[int]] = defaultdict(list)
        for rank, seat in sorted(seats.items()):
            for axis in sizes:
                seated[seat.stage, axis, seat.index[axis], seat.experts if axis == "expert" else 0].append(rank)
        self._seated = {key: tuple(ranks) for key, ranks in seated.items()}
        self._interned: dict[Ranks, Ranks] = {}

    def shards(self, rank: int) -> dict[str, Shard]:
        """See `ShardMap`."""
        if rank not in self._seats:
            return {}
        seat = self._seats[rank]
        found: dict[str, Shard] = {}
        for section in self._stages[seat.stage]:
            for weight in section.weights:
                template = self._template(weight, seat.index[weight.axis])
                if not weight.per_expert:
                    found[section.prefix + weight.name] = _named(template, section.layer)
                    continue
                experts = range(seat.experts * self._local_experts, (seat.experts + 1) * self._local_experts)
                parts = [_named(template, section.layer, expert) for expert in experts]
                if weight.stacked:
                    found[section.prefix + weight.name] = _stack(parts)
                else:
                    for local, part in enumerate(parts):
                        found[section.prefix + weight.name.format(expert=local)] = part
        return found

    def places(self, tensor: str) -> tuple[BoxReplicas, ...]:
        """See `ShardMap`."""
        entry = self._catalogue.entries.get(tensor)
        if entry is None:
            return ()
        spots: dict[Box, list[BoxLocation]] = defaultdict(list)
        for stage, prefix, weight in self._homes.get((entry.tensor.name, entry.layer), ()):
            for box, spot in self._spots(entry, stage, prefix, weight):
                spots[box].append(spot)
        return tuple(self._place(box, found) for box, found in spots.items())

    def kind(self, tensor: str) -> Hashable:
        """See `ShardMap`: its name without numbers, its stages and its group of experts."""
        entry = self._catalogue.entries[tensor]
        stages = self._stages_of.get((entry.tensor.name, entry.layer))
        return entry.tensor.name, stages, entry.expert // self._local_experts if entry.expert is not None else 0

    def _spots(self, entry: Entry, stage: int, prefix: str, weight: ParamSpec) -> Iterator[tuple[Box, BoxLocation]]:
        group, local = divmod(entry.expert, self._local_experts) if entry.expert is not None else (0, 0)
        parameter = prefix + (weight.name if weight.stacked else weight.name.format(expert=local))
        stacked: Box = ((local, local + 1),) if weight.stacked else ()
        for index in range(self._sizes[weight.axis]):
            ranks = self._seated.get((stage, weight.axis, index, group))
            if not ranks:
                continue
            for piece in self._template(weight, index).pieces:
                if piece.tensor == entry.tensor.name:
                    yield piece.source, BoxLocation(ranks, parameter, stacked + piece.target)

    def _place(self, box: Box, spots: list[BoxLocation]) -> BoxReplicas:
        ranks = tuple(sorted({rank for spot in spots for rank in spot.ranks})) if len(spots) > 1 else spots[0].ranks
        ranks = self._interned.setdefault(ranks, ranks)  # equal sets are one object: plans look them up by identity
        alike = all((spot.parameter, spot.at) == (spots[0].parameter, spots[0].at) for spot in spots)
        return BoxReplicas(
            box, ranks, (BoxLocation(ranks, spots[0].parameter, spots[0].at),) if alike else tuple(spots)
        )

    def _template(self, weight: ParamSpec, index: int) -> Shard:
        """The shard with the names of its tensors not yet filled in."""
        key = (weight, index)
        if key not in self._templates:
            self._templates[key] = weight.rule(weight.sources, index, self._sizes[weight.axis])
        return self._templates[key]


class ExplicitShardMap:
    """Holdings written down rank by rank, such as those of a traced dialect.

    UserError for a shard whose elements are not each written once.
    """

    def __init__(self, shards: Mapping[int, Mapping[str, Shard]], tensors: Mapping[str, TensorInfo]) -> None:
        self._shards, self.tensors = shards, tensors
        self.ranks = tuple(sorted(shards))
        for own in shards.values():
            for parameter, shard in own.items():
                check_shard(parameter, shard)

    def shards(self, rank: int) -> Mapping[str, Shard]:
        """See `ShardMap`."""
        return self._shards.get(rank, {})

    def places(self, tensor: str) -> Sequence[BoxReplicas]:
        """See `ShardMap`."""
        return self._index.get(tensor, ())

    def kind(self, tensor: str) -> Hashable:
        """See `ShardMap`: each is its own."""
        return tensor

    @cached_property
    def _index(self) -> dict[str, list[BoxReplicas]]:
        spots: dict[str, dict[Box, dict[tuple[str, Box], list[int]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        for rank in self.ranks:
            for parameter, shard in self._shards[rank].items():
                for piece in shard.pieces:
                    spots[piece.tensor][piece.source][parameter, piece.target].append(rank)
        interned: dict[Ranks, Ranks] = {}

        def place(box: Box, found: Mapping[tuple[str, Box], list[int]]) -> BoxReplicas:
            ranks = tuple(sorted({rank for own in found.values() for rank in own}))
            where = tuple(BoxLocation(tuple(own), parameter, at) for (parameter, at), own in found.items())
            return BoxReplicas(box, interned.setdefault(ranks, ranks), where)

        return {tensor: [place(box, found) for box, found in boxes.items()] for tensor, boxes in spots.items()}


def _named(template: Shard, layer: int | None, expert: int | None = None) -> Shard:
    pieces = tuple(Piece(p.tensor.format(layer=layer, expert=expert), p.source, p.target) for p in template.pieces)
    return Shard(template.shape, pieces, template.padding)


def _stack(parts: Sequence[Shard]) -> Shard:
    pieces = tuple(
        Piece(piece.tensor, piece.source, ((local, local + 1), *piece.target))
        for local, part in enumerate(parts)
        for piece in part.pieces
    )
    return Shard((len(parts), *parts[0].shape), pieces)
