"""Shard maps of encoded weights: the values of a matrix and its scales are two tensors, each with its own boxes.

    tensor t (576, 384), blocks of 128 x 128                 scales of t (5, 3)
    source box rows 72:144, on rank 1                        box 1:2: the blocks whose first element is in the box
    target box rows 0:576, in rows 128:704 of a parameter    box 0:5, in rows 1:6 of the parameter's scales

So plans, schedules and lower bounds of encoded weights are the usual ones. A source box may end within a block: the
ranks that have parts of it agree on its scale first (`encode.py`). A target box may not: the engine has one scale for
it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from verl_mg.errors import UserError
from verl_mg.models.tensor_index import TensorInfo
from verl_mg.reshard.encoding import Encoding, check_packing
from verl_mg.sharding.boxes import Box, Piece, Shard
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.shard_map import BoxLocation, BoxReplicas, Ranks, ShardMap


def quantized_tensors(table: ModelTable) -> frozenset[str]:
    """Returns the tensors that engines quantize: the matrices of the layers, but for routers and the like."""
    entries = table.tensor_index.entries.items()
    return frozenset(name for name, entry in entries if entry.is_layer_matrix) - table.unquantized


class EncodedShardMap(ABC):
    """Shard map of encoded weights, of a source or of a target.

    Attributes:
        encoding: format of the encoded tensors.
        encoded: names of the encoded tensors.
    """

    def __init__(self, whole: ShardMap, encoding: Encoding, encoded: Collection[str]) -> None:
        """Derives the tensors; shards are derived when they are requested.

        Args:
            whole: shard map of the weights before they are encoded.
            encoding: format of the encoded tensors.
            encoded: names of the encoded tensors, which are matrices.
        """
        self._whole, self.encoding = whole, encoding
        self.encoded = frozenset(encoded) & whole.tensors.keys()
        self.ranks = whole.ranks
        self._tensor_of = {self.scales_of(name): name for name in self.encoded}
        self.tensors: Mapping[str, TensorInfo] = self._tensors()
        self._interned: dict[Ranks, Ranks] = {}

    def scales_of(self, tensor: str) -> str:
        """Returns the name of the scales of an encoded tensor."""
        return tensor + self.encoding.scale_suffix

    def plain_name(self, tensor: str) -> str:
        """Returns the name of the tensor to which scales belong; any other name is returned as it is."""
        return self._tensor_of.get(tensor, tensor)

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        """Returns the shape of an encoded tensor before it is encoded."""
        return self._whole.tensors[tensor].shape

    def shards(self, rank: int) -> Mapping[str, Shard]:
        """Returns the rank's parameters: values and scales of the encoded ones, and the others."""
        result: dict[str, Shard] = {}
        for name, shard in self._whole.shards(rank).items():
            if not shard.pieces or shard.pieces[0].tensor not in self.encoded:
                result[name] = shard
                continue
            pieces = tuple(
                replace(piece, source=self._packed(piece.tensor, piece.source), target=self._packed(name, piece.target))
                for piece in shard.pieces
            )
            shape = (*shard.shape[:-1], shard.shape[-1] // self.encoding.packed)
            result[name + self.encoding.value_suffix] = Shard(shape, pieces)
            self._add_scales(result, name, shard)
        return result

    def replicas(self, tensor: str) -> Sequence[BoxReplicas]:
        """Returns the boxes of values or scales, each with all its ranks."""
        if tensor in self.encoded:
            return [self._values(item) for item in self._whole.replicas(tensor)]
        if tensor not in self._tensor_of:
            return self._whole.replicas(tensor)
        locations: dict[Box, list[BoxLocation]] = defaultdict(list)
        for item in self._whole.replicas(self._tensor_of[tensor]):
            for location in item.locations:
                piece = Piece(self._tensor_of[tensor], item.box, location.parameter_box)
                scales = self._scales(location.parameter, piece)
                if scales:
                    name, box, at = scales
                    locations[box].append(BoxLocation(location.ranks, name, at))
        return [self._merged(box, places) for box, places in locations.items()]

    def sharding_key(self, tensor: str) -> Hashable:
        """Returns the key of the tensor, and whether it is the scales of the tensor of that key."""
        return tensor in self._tensor_of, self._whole.sharding_key(self._tensor_of.get(tensor, tensor))

    def _tensors(self) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, info in self._whole.tensors.items():
            position = 2 * info.position  # odd positions are for scales, which so travel with their values
            if name not in self.encoded:
                tensors[name] = replace(info, position=position)
                continue
            shape = (*info.shape[:-1], info.shape[-1] // self.encoding.packed)
            tensors[name] = TensorInfo(position, shape, dtype=self.encoding.dtype)
            grid = self.encoding.grid(info.shape)
            tensors[self.scales_of(name)] = TensorInfo(position + 1, grid, dtype=self.encoding.scale_dtype)
        return tensors

    def _packed(self, name: str, box: Box) -> Box:
        if self.encoding.packed == 1:
            return box
        check_packing(self.encoding, name, box)
        start, stop = box[-1]
        return (*box[:-1], (start // self.encoding.packed, stop // self.encoding.packed))

    def _values(self, item: BoxReplicas) -> BoxReplicas:
        locations = tuple(
            BoxLocation(
                location.ranks,
                location.parameter + self.encoding.value_suffix,
                self._packed(location.parameter, location.parameter_box),
            )
            for location in item.locations
        )
        return BoxReplicas(self._packed(locations[0].parameter, item.box), item.ranks, locations)

    def _merged(self, box: Box, locations: list[BoxLocation]) -> BoxReplicas:
        ranks = tuple(sorted({rank for location in locations for rank in location.ranks}))
        ranks = self._interned.setdefault(ranks, ranks)  # plans look equal sets of ranks up by identity
        places = {(location.parameter, location.parameter_box) for location in locations}
        if len(places) == 1:
            return BoxReplicas(box, ranks, (BoxLocation(ranks, *places.pop()),))
        return BoxReplicas(box, ranks, tuple(locations))

    @abstractmethod
    def _add_scales(self, result: dict[str, Shard], name: str, shard: Shard) -> None:
        """Adds the scales of a parameter."""

    @abstractmethod
    def _scales(self, parameter: str, piece: Piece) -> tuple[str, Box, Box] | None:
        """Returns the boxes of the scales that belong to a piece: parameter, box in the tensor, box in the parameter.

        None where no scale belongs to it.
        """


class EncodedSource(EncodedShardMap):
    """The weights of the ranks that encode; each rank has memory for the scales of its whole tensors."""

    def _add_scales(self, result: dict[str, Shard], name: str, shard: Shard) -> None:
        for piece in shard.pieces:
            scales = self._scales(name, piece)
            if scales:
                tensor, box, _ = scales
                before = result.get(tensor, Shard(self.encoding.grid(self.shape_of(piece.tensor)), ()))
                result[tensor] = replace(before, pieces=(*before.pieces, Piece(tensor, box, box)))

    def _scales(self, parameter: str, piece: Piece) -> tuple[str, Box, Box] | None:
        block = self.encoding.block(self.shape_of(piece.tensor))
        # The blocks whose first element is in the box: so each scale is in one box of the source, as plans require.
        box = tuple(
            (-(-start // size), -(-stop // size)) for (start, stop), size in zip(piece.source, block, strict=True)
        )
        if any(start == stop for start, stop in box):
            return None
        return self.scales_of(piece.tensor), box, box

    def part(self, tensors: Collection[str]) -> EncodedPart:
        """Returns the shard map of some of the tensors."""
        return EncodedPart(self, tensors)

    def shared_blocks(self, tensor: str) -> npt.NDArray[np.bool_]:
        """Returns the blocks of which different sets of ranks have parts: (block rows, block columns) bool."""
        shape = self.shape_of(tensor)
        block, count = self.encoding.block(shape), np.zeros(self.encoding.grid(shape), np.int64)
        by_ranks: dict[Ranks, list[Box]] = defaultdict(list)
        for item in self._whole.replicas(tensor):
            by_ranks[item.ranks].append(item.box)
        for boxes in by_ranks.values():
            touched = np.zeros_like(count, dtype=bool)
            for box in boxes:
                rows, columns = (
                    slice(start // size, -(-stop // size)) for (start, stop), size in zip(box, block, strict=True)
                )
                touched[rows, columns] = True
            count += touched
        return count > 1

    def plain_shards(self, rank: int) -> Mapping[str, Shard]:
        """Returns the rank's parameters before they are encoded."""
        return self._whole.shards(rank)

    def plain_key(self, tensor: str) -> Hashable:
        """Returns the sharding key of a tensor before it is encoded."""
        return self._whole.sharding_key(tensor)


class EncodedPart:
    """Shard map of some of the tensors of an encoded source, scales among them."""

    def __init__(self, source: EncodedSource, tensors: Collection[str]) -> None:
        self.source, self.ranks = source, source.ranks
        self.tensors: Mapping[str, TensorInfo] = {name: source.tensors[name] for name in tensors}

    def shards(self, rank: int) -> Mapping[str, Shard]:
        """Returns the rank's parameters with their pieces of the part's tensors."""
        result: dict[str, Shard] = {}
        for name, shard in self.source.shards(rank).items():
            pieces = tuple(piece for piece in shard.pieces if piece.tensor in self.tensors)
            if pieces:
                result[name] = Shard(shard.shape, pieces)
        return result

    def replicas(self, tensor: str) -> Sequence[BoxReplicas]:
        """Returns the replicas of a tensor of the part; empty for other tensors."""
        return self.source.replicas(tensor) if tensor in self.tensors else ()

    def sharding_key(self, tensor: str) -> Hashable:
        """Returns the key of the whole source."""
        return self.source.sharding_key(tensor)


class EncodedTarget(EncodedShardMap):
    """The parameters of a quantized engine: `weight` and its scales, with the boxes of the weights that it has."""

    def _add_scales(self, result: dict[str, Shard], name: str, shard: Shard) -> None:
        pieces = []
        for piece in shard.pieces:
            scales = self._scales(name, piece)
            assert scales, "a piece of a target has scales"
            pieces.append(Piece(self.scales_of(piece.tensor), scales[1], scales[2]))
        last = self.encoding.block(self.shape_of(shard.pieces[0].tensor))
        grid = tuple(-(-size // length) for size, length in zip(shard.shape[-2:], last, strict=True))
        result[name + self.encoding.scale_suffix] = Shard((*shard.shape[:-2], *grid), tuple(pieces))

    def _scales(self, parameter: str, piece: Piece) -> tuple[str, Box, Box]:
        # A piece must begin at a block, in the tensor and in the parameter, and end at one or with the tensor: then
        # block n of the piece is block n of its scales in both, and each block of the parameter has one scale.
        shape = self.shape_of(piece.tensor)
        block, stacked = self.encoding.block(shape), len(piece.target) - len(piece.source)
        box, at = [], list(piece.target[:stacked])
        ranges = zip(piece.source, piece.target[stacked:], shape, block, strict=True)
        for axis, ((start, stop), (first, _), size, length) in enumerate(ranges):
            any_part = axis == 1 and self.encoding.columns is None  # each part of a row has the scale of the row
            if not any_part and (start % length or first % length or (stop % length and stop != size)):
                raise UserError(
                    f"{parameter}: the box {piece.source} of {piece.tensor} does not consist of whole "
                    f"blocks of {block}, as an engine with this quantization requires. Choose a layout that divides "
                    "the tensor into whole blocks, or rollout.wire=cast."
                )
            scales = (start // length, -(-stop // length))
            box.append(scales)
            at.append((first // length, first // length + scales[1] - scales[0]))
        return parameter + self.encoding.scale_suffix, tuple(box), tuple(at)
