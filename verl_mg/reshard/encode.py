"""Encoded weights: their shard maps, and the encoding of a rank's weights before they are sent.

The values of a matrix and its scales are two tensors, each with its own boxes, so plans, schedules and lower bounds of
encoded weights are the usual ones:

    tensor t (576, 384), blocks of 128 x 128                 scales of t (5, 3)
    source box rows 72:144, on rank 1                        box 1:2: the blocks whose first element is in the box
    target box rows 0:576, in rows 128:704 of a parameter    box 0:5, in rows 1:6 of the parameter's scales

A source box may end within a block: the ranks that have parts of it agree on its scale first. A target box may not: the
engine has one scale for it. Weights are encoded exactly as if each tensor was quantized as a whole (`Encoder`):

    1  the largest magnitudes of all blocks are computed from this rank's boxes
    2  for blocks that are distributed over ranks they are maximized over the ranks: one collective, 4 bytes a block
    3  scales and values follow from them, element by element

Encoded values exist only in messages and in the engine's memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from verl_mg import device
from verl_mg.dtypes import torch_dtype
from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import
from verl_mg.models.tensor_index import TensorInfo
from verl_mg.reshard.encoding import SLAB_ELEMENTS, Encoding, add_largest, check_packing, encode_box
from verl_mg.reshard.execute import Computed, Sources
from verl_mg.reshard.schedule import Schedule
from verl_mg.sharding.boxes import Box, Piece, Shard, box_shape, intersect, slices
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.shard_map import BoxLocation, BoxReplicas, Ranks, Replicas, ShardMap

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    import torch.distributed as dist
    from torch import Tensor
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")
    dist = lazy_import("torch.distributed")


def quantized_tensors(table: ModelTable) -> frozenset[str]:
    """Returns the tensors that engines quantize: the matrices of the layers, but for routers and the like."""
    entries = table.tensor_index.entries.items()
    return frozenset(name for name, entry in entries if entry.is_layer_matrix) - table.unquantized


class EncodedShardMap(ABC):
    """Shard map of encoded weights, of a source or of a target; `encoded` are the names of the encoded matrices.

    `whole` is the shard map of the weights before they are encoded.
    """

    def __init__(self, whole: ShardMap, encoding: Encoding, encoded: Collection[str]) -> None:
        self.whole, self.encoding = whole, encoding
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

    def shards(self, rank: int) -> Mapping[str, Shard]:
        """Returns the rank's parameters: values and scales of the encoded ones, and the others."""
        result: dict[str, Shard] = {}
        for name, shard in self.whole.shards(rank).items():
            if not shard.pieces or shard.pieces[0].tensor not in self.encoded:
                result[name] = shard
                continue
            pieces = tuple(
                replace(piece, source=self._packed(piece.tensor, piece.source), target=self._packed(name, piece.target))
                for piece in shard.pieces
            )
            shape = (*shard.shape[:-1], shard.shape[-1] // self.encoding.packed)
            result[name + self.encoding.value_suffix] = Shard(shape, pieces, order=shard.order)
            self._add_scales(result, name, shard)
        return result

    def replicas(self, tensor: str) -> Replicas:
        """Returns the boxes of values or scales, each with all its ranks."""
        if tensor in self.encoded:
            return Replicas(self._values(item) for item in self.whole.replicas(tensor))
        if tensor not in self._tensor_of:
            return self.whole.replicas(tensor)
        locations: dict[Box, list[BoxLocation]] = defaultdict(list)
        for item in self.whole.replicas(self._tensor_of[tensor]):
            for location in item.locations:
                piece = Piece(self._tensor_of[tensor], item.box, location.parameter_box)
                scales = self._scales(location.parameter, piece)
                if scales:
                    name, box, at = scales
                    locations[box].append(BoxLocation(location.ranks, name, at))
        return Replicas(self._merged(box, places) for box, places in locations.items())

    def sharding_key(self, tensor: str) -> Hashable:
        """Returns the key of the tensor, and whether it is the scales of the tensor of that key."""
        return tensor in self._tensor_of, self.whole.sharding_key(self._tensor_of.get(tensor, tensor))

    def _tensors(self) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, info in self.whole.tensors.items():
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
        """Returns parameter, box in the tensor and box in the parameter of the scales of a piece; None without any."""


class EncodedSource(EncodedShardMap):
    """The weights of the ranks that encode; each rank has memory for the scales of its whole tensors."""

    def __init__(self, whole: ShardMap, encoding: Encoding, encoded: Collection[str]) -> None:
        super().__init__(whole, encoding, encoded)
        self._pieces: dict[int, Mapping[str, Sequence[tuple[str, Piece]]]] = {}

    def _add_scales(self, result: dict[str, Shard], name: str, shard: Shard) -> None:
        for piece in shard.pieces:
            scales = self._scales(name, piece)
            if scales:
                tensor, box, _ = scales
                before = result.get(tensor, Shard(self.encoding.grid(self.whole.tensors[piece.tensor].shape), ()))
                result[tensor] = replace(before, pieces=(*before.pieces, Piece(tensor, box, box)))

    def _scales(self, parameter: str, piece: Piece) -> tuple[str, Box, Box] | None:
        block = self.encoding.block(self.whole.tensors[piece.tensor].shape)
        # The blocks whose first element is in the box: so each scale is in one box of the source, as plans require.
        box = tuple(
            (-(-start // size), -(-stop // size)) for (start, stop), size in zip(piece.source, block, strict=True)
        )
        if any(start == stop for start, stop in box):
            return None
        return self.scales_of(piece.tensor), box, box

    def pieces(self, rank: int) -> Mapping[str, Sequence[tuple[str, Piece]]]:
        """Returns the pieces that a rank has of each encoded matrix, and their parameters."""
        if rank not in self._pieces:
            pieces: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
            for parameter, shard in self.whole.shards(rank).items():
                for piece in shard.pieces:
                    if piece.tensor in self.encoded:
                        pieces[piece.tensor].append((parameter, piece))
            self._pieces[rank] = pieces
        return self._pieces[rank]

    def shared_blocks(self, tensor: str) -> npt.NDArray[np.bool_]:
        """Returns the blocks of which different sets of ranks have parts: (block rows, block columns) bool."""
        shape = self.whole.tensors[tensor].shape
        block, count = self.encoding.block(shape), np.zeros(self.encoding.grid(shape), np.int64)
        by_ranks: dict[Ranks, list[Box]] = defaultdict(list)
        for item in self.whole.replicas(tensor):
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


class EncodedTarget(EncodedShardMap):
    """The parameters of a quantized engine: `weight` and its scales, with the boxes of the weights that it has."""

    def _add_scales(self, result: dict[str, Shard], name: str, shard: Shard) -> None:
        pieces = []
        for piece in shard.pieces:
            scales = self._scales(name, piece)
            assert scales, "a piece of a target has scales"
            pieces.append(Piece(self.scales_of(piece.tensor), scales[1], scales[2]))
        last = self.encoding.block(self.whole.tensors[shard.pieces[0].tensor].shape)
        grid = tuple(-(-size // length) for size, length in zip(shard.shape[-2:], last, strict=True))
        result[name + self.encoding.scale_suffix] = Shard((*shard.shape[:-2], *grid), tuple(pieces))

    def _scales(self, parameter: str, piece: Piece) -> tuple[str, Box, Box]:
        # A piece must begin at a block, in the tensor and in the parameter, and end at one or with the tensor: then
        # block n of the piece is block n of its scales in both, and each block of the parameter has one scale.
        shape = self.whole.tensors[piece.tensor].shape
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


@dataclass(frozen=True)
class EncodedMaps:
    """The shard maps of encoded weights."""

    source: EncodedSource  # shards of the ranks that encode
    target: EncodedTarget  # parameters of the engines


def encoded_maps(table: ModelTable, source: ShardMap, target: ShardMap, encoding: Encoding) -> EncodedMaps:
    """Returns the shard maps of the weights that engines quantize, from maps of the weights before."""
    names = quantized_tensors(table)
    return EncodedMaps(EncodedSource(source, encoding, names), EncodedTarget(target, encoding, names))


def check_engine_blocks(table: ModelTable, target: ShardMap, encoding: Encoding, ranks: Iterable[int]) -> None:
    """Raises a UserError where engines cannot have such weights, or a layout cuts a block or a tile of a rank."""
    if encoding.tile and (table.config.experts or table.config.latent):
        raise UserError(
            f"rollout.wire={encoding.wire}: the engine stores experts and latent attention in other forms than these "
            f"shards, and {table.config.architecture} has them. Write rollout.wire=fp8_block or fp8_channel."
        )
    encoded = encoded_maps(table, target, target, encoding).target
    for rank in ranks:
        encoded.shards(rank)
        for name, shard in target.shards(rank).items():
            if shard.order and shard.pieces and shard.pieces[0].tensor in encoded.encoded:
                raise UserError(
                    f"{name}: the engine has {shard.pieces[0].tensor} transposed, and scales of transposed weights are "
                    "not supported. Write rollout.wire=cast."
                )
            if encoding.tile and shard.pieces and shard.pieces[0].tensor in encoded.encoded:
                (rows, columns), (height, width) = shard.shape, encoding.tile
                if rows % height or columns % width:
                    raise UserError(
                        f"{name}: a rank of the engine has {rows} x {columns} of it, and the kernel for "
                        f"rollout.wire={encoding.wire} needs multiples of {height} x {width}. Choose a smaller tp in "
                        "rollout.layout, or rollout.wire=cast."
                    )


class Encoder:
    """Encoder of one part of a model on one rank, used for every weight sync."""

    # Ranks agree on scales, and do not move the rows of shared blocks to one of them: that would send twice. Scales are
    # computed first, for all tensors of the part, and values box by box as they are sent.

    def __init__(self, source: EncodedSource, tensors: Collection[str], schedule: Schedule, dtype: torch.dtype) -> None:
        self._source, self._dtype, self._schedule = source, dtype, schedule
        self._encoding = source.encoding
        encoded = [name for name in tensors if name in source.encoded]
        # One mask for all tensors with the same boxes, such as one kind of each layer.
        masks: dict[Hashable, torch.Tensor] = {}
        for name in encoded:
            key = source.whole.sharding_key(name)
            if key not in masks:
                masks[key] = torch.from_numpy(np.ascontiguousarray(source.shared_blocks(name)))
        self._shared = {name: masks[source.whole.sharding_key(name)] for name in encoded}
        self.bytes_exchanged = 4 * sum(int(mask.sum()) for mask in self._shared.values())
        """Bytes of largest magnitudes that the ranks exchange in a run, in addition to the schedule's."""
        pieces = source.pieces(schedule.rank)
        self._pieces = {name: pieces[name] for name in encoded if name in pieces}
        # Of tensors that this rank sends a part of, or of whose largest magnitudes others need its part.
        sent = schedule.source_parameters
        self._read = [
            name
            for name, parts in self._pieces.items()
            if source.scales_of(name) in sent
            or any(parameter + self._encoding.value_suffix in sent for parameter, _ in parts)
            or self._shared[name].any()
        ]

    @cached_property
    def source_parameters(self) -> frozenset[str]:
        """Parameters that are read before they are encoded."""
        read = {name for tensor in self._read for name, _ in self._pieces[tensor]}
        scales = {self._source.scales_of(tensor) for tensor in self._pieces}
        values = {name + self._encoding.value_suffix for pieces in self._pieces.values() for name, _ in pieces}
        return frozenset(self._schedule.source_parameters - scales - values | read)

    def run(
        self,
        parameters: Mapping[str, Tensor],
        wait_for: Callable[[str], object],
        group: dist.ProcessGroup | None = None,
    ) -> Sources:
        """Returns what the schedule sends: scales, and values that are encoded when they are sent.

        All ranks of the group call it together.
        """
        here = device.current_device()
        for name in self.source_parameters:
            wait_for(name)
        # The scales of all tensors are parts of one, so that they take one operation of each kind.
        grids = {name: self._encoding.grid(self._source.whole.tensors[name].shape) for name in self._shared}
        sizes = {name: math.prod(grids[name]) for name in dict.fromkeys([*self._exchanged, *self._read])}
        magnitudes = torch.zeros(sum(sizes.values()), device=here)
        largest = dict(zip(sizes, magnitudes.split(list(sizes.values())), strict=True))
        for name in self._read:
            shape = self._source.whole.tensors[name].shape
            for parameter, piece in self._pieces[name]:
                values = self._values(parameters, parameter, piece, piece.target)
                add_largest(largest[name].view(grids[name]), values, piece.source, self._encoding.block(shape))
        self._exchange(magnitudes, group)
        parts = self._scales(magnitudes).split(list(sizes.values()))
        scales = {name: part.view(grids[name]) for name, part in zip(sizes, parts, strict=True)}
        result: dict[str, Tensor | Computed] = {self._source.scales_of(name): scales[name] for name in self._read}
        encoded = {name + self._encoding.value_suffix: name for parts in self._pieces.values() for name, _ in parts}
        for name, shape in self._schedule.source_shapes.items():
            if name in encoded:
                write = partial(self._write, parameters, scales, encoded[name])
                result[name] = Computed(shape, torch_dtype(self._encoding.dtype), here, write)
            elif name not in result:
                result[name] = parameters[name]
        return result

    def _scales(self, magnitudes: Tensor) -> Tensor:
        """Returns the scales of blocks, slab by slab: blocks of few elements have many of them."""
        encoding = self._encoding
        dtype = torch_dtype(encoding.scale_dtype) if encoding.scale_dtype else self._dtype
        scales = torch.empty_like(magnitudes, dtype=dtype)
        for part, of_part in zip(magnitudes.split(SLAB_ELEMENTS), scales.split(SLAB_ELEMENTS), strict=True):
            of_part.copy_(encoding.scales(part, self._dtype))
        return scales

    def _write(
        self,
        parameters: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        parameter: str,
        tensor: str,
        box: Box,
        target: Tensor,
    ) -> None:
        """Encodes the elements of a tensor in a box of the encoded parameter."""
        *others, (start, stop) = box
        at: Box = (*others, (start * self._encoding.packed, stop * self._encoding.packed))
        (piece,) = (
            piece for name, piece in self._pieces[tensor] if name == parameter and intersect(at, piece.target) == at
        )
        source = piece.source_of(at)
        values = self._values(parameters, parameter, piece, at)
        encode_box(self._encoding, values, scales[tensor], source, target.view(*values.shape[:-1], stop - start))

    def _values(self, parameters: Mapping[str, Tensor], parameter: str, piece: Piece, box: Box) -> Tensor:
        """Returns the elements in a box of the parameter within a piece, with the dimensions of its tensor."""
        values = parameters[parameter].detach()[slices(box)]
        return values.view(box_shape(piece.source_of(box))).to(self._dtype)

    @cached_property
    def _exchanged(self) -> Mapping[str, Tensor]:
        """The tensors with blocks that are distributed over ranks, and which blocks these are, flattened."""
        return {name: mask.flatten() for name, mask in self._shared.items() if mask.any()}

    def _exchange(self, magnitudes: Tensor, group: dist.ProcessGroup | None) -> None:
        """Maximizes the largest magnitudes of blocks that are distributed over ranks."""
        if not self.bytes_exchanged:
            return
        # All ranks have these tensors first, in the same order, with zeros for what they do not have.
        places = torch.cat([*self._exchanged.values()]).nonzero().squeeze(1).to(magnitudes.device)
        everyone = magnitudes[places]
        dist.all_reduce(everyone, dist.ReduceOp.MAX, group)
        magnitudes[places] = everyone
