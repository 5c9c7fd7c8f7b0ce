"""Sharding of a model over ranks, indexed both ways: rank -> shards, tensor -> the locations of its boxes.

    Hugging Face tensor t (6, 4), tensor parallel 2, ranks 0 and 1, replicated on ranks 2 and 3:

              columns 0-3
            +-------------+
    rows    |  box 0:3    |  BoxReplicas(box 0:3, ranks (0, 2), locations ...)
    0-2     |             |
            +-------------+
    rows    |  box 3:6    |  BoxReplicas(box 3:6, ranks (1, 3), locations ...)
    3-5     |             |
            +-------------+

    shard of rank 0: parameter "fused.weight" (6, 4)
            +-------------+
            | piece: t    |  <- BoxLocation(ranks (0, 2), parameter "fused.weight", parameter_box 0:3, 0:4)
            +-------------+
            | piece: u    |     rows of another tensor in the same parameter
            +-------------+

We say *box* for ranges of a tensor, *piece* for a box together with its position in a shard, *shard* for a parameter on
one rank, *location* for the position of a box in a parameter of some ranks, and *replicas* for a box together with all
ranks that have it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, overload

from verl_mg.models.tensor_index import TensorEntry, TensorIndex, TensorInfo
from verl_mg.sharding.boxes import FEW_BOXES, Box, BoxIndex, Order, Piece, Shard, check_shard, intersect
from verl_mg.sharding.param_spec import Axis, ParamBlock, ParamRow

Ranks = tuple[int, ...]
KEPT_TENSORS = 2**14
"""Tensors whose replicas a shard map keeps, because plans look them up several times; the bound limits its memory."""


@dataclass(frozen=True, slots=True)
class BoxLocation:
    """Position of a box of a tensor in the memory of some ranks."""

    ranks: Ranks  # global ranks, in rising order
    parameter: str  # parameter that contains the box on these ranks
    parameter_box: Box  # box of the same elements in the parameter


@dataclass(frozen=True, slots=True)
class BoxReplicas:
    """A box of a tensor and all ranks that have it."""

    box: Box  # box in the Hugging Face tensor
    ranks: Ranks  # global ranks that have the box, in rising order
    # Positions in the ranks' parameters; a single one where they are the same on all ranks.
    locations: tuple[BoxLocation, ...]

    def location_on(self, rank: int) -> BoxLocation:
        """Returns the location on one of the ranks, the first of several."""
        if len(self.locations) == 1:
            return self.locations[0]
        return next(location for location in self.locations if rank in location.ranks)


class Replicas(Sequence[BoxReplicas]):
    """The distinct boxes of a tensor, found by their place: a traced table may have many thousands."""

    def __init__(self, items: Iterable[BoxReplicas] = ()) -> None:
        self._items = tuple(items)

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, at: int) -> BoxReplicas: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[BoxReplicas]: ...
    def __getitem__(self, at: int | slice) -> BoxReplicas | Sequence[BoxReplicas]:
        return self._items[at]

    def __iter__(self) -> Iterator[BoxReplicas]:
        return iter(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Replicas) and self._items == other._items

    def __hash__(self) -> int:
        return hash(self._items)

    def of(self, box: Box) -> BoxReplicas:
        """Returns the replicas of a box, which is one of the tensor's."""
        return self._by_box[box]

    def overlaps(self, box: Box) -> Iterator[tuple[BoxReplicas, Box]]:
        """Yields the replicas with elements in a box, and the box of these elements."""
        numbers = self._index.candidates(box) if len(self._items) > FEW_BOXES else range(len(self._items))
        for number in numbers:
            if (common := intersect(self._items[number].box, box)) is not None:
                yield self._items[number], common

    @cached_property
    def _by_box(self) -> dict[Box, BoxReplicas]:
        return {item.box: item for item in self._items}

    @cached_property
    def _index(self) -> BoxIndex:
        return BoxIndex([item.box for item in self._items])


class ShardMap(Protocol):
    """Parameters of a set of global ranks; pure data that is the same on every process."""

    @property
    def ranks(self) -> Ranks:
        """Ranks that have a part of the model, in rising order."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Tensors of the model by their Hugging Face names."""
        ...

    def shards(self, rank: int) -> Mapping[str, Shard]:
        """Returns the parameters of a rank; empty for a rank without any."""
        ...

    def replicas(self, tensor: str) -> Replicas:
        """Returns the distinct boxes of a tensor, each with all its ranks; empty where no rank has the tensor."""
        ...

    def sharding_key(self, tensor: str) -> Hashable:
        """Returns a key that is equal for tensors with the same boxes on the same ranks."""
        ...


@dataclass(frozen=True)
class ParallelIndex:
    """Position of a rank in the parallel dimensions of a model."""

    stage: int
    expert_group: int  # index on the expert-parallel axis
    axis_index: Mapping[Axis, int]  # index on each axis that shards parameters


class DerivedShardMap:
    """Shard map that is derived from a table: blocks of parameters on stages, sharded along axes."""

    def __init__(
        self,
        tensor_index: TensorIndex,
        stages: Sequence[Sequence[ParamBlock]],
        axis_sizes: Mapping[Axis, int],
        local_experts: int,
        indices: Mapping[int, ParallelIndex],
    ) -> None:
        self._tensor_index, self._stages, self._axis_sizes, self._indices = tensor_index, stages, axis_sizes, indices
        self._local_experts = local_experts
        self.ranks = tuple(sorted(indices))
        self.tensors: Mapping[str, TensorInfo] = tensor_index.tensors
        # All layers and experts share the shards of a table row: only the names of their tensors differ.
        self._templates: dict[tuple[ParamRow, int], Shard] = {}
        self._specs: dict[tuple[str, int | None], list[tuple[int, str, ParamRow]]] = defaultdict(list)
        for stage, blocks in enumerate(stages):
            for block in blocks:
                for param in block.params:
                    # By the name with placeholders and the layer: experts of a layer share an entry.
                    for tensor in param.tensors:
                        self._specs[tensor.name, block.layer].append((stage, block.prefix, param))
        self._stages_of = {key: tuple(stage for stage, *_ in specs) for key, specs in self._specs.items()}
        members: dict[tuple[int, Axis, int, int], list[int]] = defaultdict(list)
        for rank, index in sorted(indices.items()):
            for axis in axis_sizes:
                # Dense parameters are the same in every expert group: their ranks are all of the stage.
                group = index.expert_group if axis == "expert" else 0
                members[index.stage, axis, index.axis_index[axis], group].append(rank)
        self._members = {key: tuple(ranks) for key, ranks in members.items()}
        self._interned: dict[Ranks, Ranks] = {}
        self._replicas: dict[str, Replicas] = {}

    def shards(self, rank: int) -> dict[str, Shard]:
        """Builds the shards of the parameters on the rank's stage."""
        if rank not in self._indices:
            return {}
        index = self._indices[rank]
        result: dict[str, Shard] = {}
        for block in self._stages[index.stage]:
            for param in block.params:
                template = self._template(param, index.axis_index[param.axis])
                if not param.per_expert:
                    result[block.prefix + param.name] = _with_names(template, block.layer)
                    continue
                first = index.expert_group * self._local_experts
                experts = range(first, first + self._local_experts)
                parts = [_with_names(template, block.layer, expert) for expert in experts]
                if param.stacked:
                    result[block.prefix + param.name] = _stack(parts, param.order)
                else:
                    for local, part in enumerate(parts):
                        result[block.prefix + param.name.format(expert=local)] = part
        return result

    def replicas(self, tensor: str) -> Replicas:
        """Collects the boxes of the tensor over all parameters that contain it, and keeps them."""
        if tensor not in self._replicas:
            if len(self._replicas) == KEPT_TENSORS:
                self._replicas.clear()
            self._replicas[tensor] = self._collect_replicas(tensor)
        return self._replicas[tensor]

    def sharding_key(self, tensor: str) -> Hashable:
        """Returns the name without layer and expert numbers, the stages, and the group of the expert."""
        # A plan is checked and counted once for each key: for the layers of a stage together.
        entry = self._tensor_index.entries[tensor]
        stages = self._stages_of.get((entry.tensor.name, entry.layer))
        return entry.tensor.name, stages, entry.expert // self._local_experts if entry.expert is not None else 0

    def _collect_replicas(self, tensor: str) -> Replicas:
        entry = self._tensor_index.entries.get(tensor)
        if entry is None:
            return Replicas()
        locations: dict[Box, list[BoxLocation]] = defaultdict(list)
        for stage, prefix, param in self._specs.get((entry.tensor.name, entry.layer), ()):
            for box, location in self._locations(entry, stage, prefix, param):
                locations[box].append(location)
        return _box_replicas(locations, self._interned)

    def _locations(
        self, entry: TensorEntry, stage: int, prefix: str, param: ParamRow
    ) -> Iterator[tuple[Box, BoxLocation]]:
        group, local = divmod(entry.expert, self._local_experts) if entry.expert is not None else (0, 0)
        name = prefix + (param.name if param.stacked else param.name.format(expert=local))
        stacked: Box = ((local, local + 1),) if param.stacked else ()
        for index in range(self._axis_sizes[param.axis]):
            ranks = self._members.get((stage, param.axis, index, group))
            if not ranks:
                continue
            for piece in self._template(param, index).pieces:
                if piece.tensor == entry.tensor.name:
                    yield piece.source, BoxLocation(ranks, name, stacked + piece.target)

    def _template(self, param: ParamRow, index: int) -> Shard:
        """Returns the shard at an axis index, with placeholders for layer and expert in the tensors' names."""
        key = (param, index)
        if key not in self._templates:
            shard = param.rule(param.tensors, index, self._axis_sizes[param.axis])
            # A stack of templates has a dimension more.
            self._templates[key] = shard if param.stacked else replace(shard, order=param.order)
        return self._templates[key]


class ExplicitShardMap:
    """Shard map that is given rank by rank, such as that of a traced table."""

    def __init__(self, shards: Mapping[int, Mapping[str, Shard]], tensors: Mapping[str, TensorInfo]) -> None:
        self._shards, self.tensors = shards, tensors
        self.ranks = tuple(sorted(shards))
        for rank_shards in {id(rank_shards): rank_shards for rank_shards in shards.values()}.values():  # each once
            for parameter, shard in rank_shards.items():
                check_shard(parameter, shard)

    def shards(self, rank: int) -> Mapping[str, Shard]:
        """Returns the given shards of the rank."""
        return self._shards.get(rank, {})

    def replicas(self, tensor: str) -> Replicas:
        """Returns the boxes of the tensor from an index of all shards, which the first call builds."""
        return self._index.get(tensor, Replicas())

    def sharding_key(self, tensor: str) -> Hashable:
        """Returns the tensor's name: two tensors are never known to have the same boxes."""
        return tensor

    @cached_property
    def _index(self) -> dict[str, Replicas]:
        locations: dict[str, dict[Box, dict[tuple[str, Box], list[int]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        for rank in self.ranks:
            for parameter, shard in self._shards[rank].items():
                for piece in shard.pieces:
                    locations[piece.tensor][piece.source][parameter, piece.target].append(rank)
        interned: dict[Ranks, Ranks] = {}
        return {
            tensor: _box_replicas(
                {
                    box: [BoxLocation(tuple(at), *place) for place, at in places.items()]
                    for box, places in boxes.items()
                },
                interned,
            )
            for tensor, boxes in locations.items()
        }


def _with_names(template: Shard, layer: int | None, expert: int | None = None) -> Shard:
    """Returns the template with the numbers of layer and expert in its tensors' names."""
    pieces = tuple([Piece(p.tensor.format(layer=layer, expert=expert), p.source, p.target) for p in template.pieces])
    return Shard(template.shape, pieces, template.padding, template.order)  # `replace` takes three times as long


def _stack(parts: Sequence[Shard], order: Order) -> Shard:
    """Stacks shards of equal shape along a new first dimension, of a parameter with its dimensions in this order."""
    pieces = tuple(
        Piece(piece.tensor, piece.source, ((local, local + 1), *piece.target))
        for local, part in enumerate(parts)
        for piece in part.pieces
    )
    padding = tuple(((0, len(parts)), *box) for box in parts[0].padding)  # the same in each
    return Shard((len(parts), *parts[0].shape), pieces, padding, order)


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

    def replicas(self, tensor: str) -> Replicas:
        """Returns the distinct boxes of a tensor in all maps, each with the ranks of all of them."""
        # One box for ranks of several maps: a plan then sends it once to each node, whatever the layouts on it.
        locations: dict[Box, list[BoxLocation]] = defaultdict(list)
        for part in self._maps:
            for item in part.replicas(tensor):
                locations[item.box] += item.locations
        return _box_replicas(locations, self._interned)

    def sharding_key(self, tensor: str) -> Hashable:
        """Returns the keys of all maps: tensors are equal where they are equal in each."""
        return tuple(part.sharding_key(tensor) for part in self._maps)


def _box_replicas(locations: Mapping[Box, Sequence[BoxLocation]], interned: dict[Ranks, Ranks]) -> Replicas:
    """Returns boxes with all ranks that have them, whose tuples are equal objects where they are equal."""
    result = []
    for box, at in locations.items():
        ranks = at[0].ranks if len(at) == 1 else tuple(sorted({rank for location in at for rank in location.ranks}))
        ranks = interned.setdefault(ranks, ranks)  # plans look sets of ranks up by identity
        # One location for all ranks where it is the same: plans then handle the ranks as one set.
        positions = {(location.parameter, location.parameter_box) for location in at}
        locations_of = (BoxLocation(ranks, *positions.pop()),) if len(positions) == 1 else tuple(at)
        result.append(BoxReplicas(box, ranks, locations_of))
    return Replicas(result)
