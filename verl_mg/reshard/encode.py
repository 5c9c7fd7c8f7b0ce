"""Encoding of a rank's weights before they are sent, exactly as if each tensor was quantized as a whole.

    1  the largest magnitudes of all blocks are computed from this rank's boxes
    2  for blocks that are distributed over ranks they are maximized over the ranks: one collective, 4 bytes a block
    3  scales and values follow from them, element by element

Ranks need memory for the encoded values of one part of the model at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.errors import UserError
from verl_mg.reshard.encoded_shard_map import EncodedPart, EncodedSource, EncodedTarget, quantized_tensors
from verl_mg.reshard.encoding import Encoding, add_largest, encode_box
from verl_mg.reshard.schedule import Schedule
from verl_mg.sharding.boxes import BlockSize, Piece, box_shape, slices
from verl_mg.sharding.model_table import ModelTable
from verl_mg.sharding.shard_map import ShardMap


@dataclass(frozen=True)
class EncodedMaps:
    """The shard maps of encoded weights."""

    source: EncodedSource  # shards of the ranks that encode
    target: EncodedTarget  # parameters of the engines

    @property
    def keep_together(self) -> Iterable[Sequence[str]]:
        """Names of values and their scales, which are in one part of the model."""
        return [(name, self.target.scales_of(name)) for name in self.target.encoded]


def encoded_maps(table: ModelTable, source: ShardMap, target: ShardMap, encoding: Encoding) -> EncodedMaps:
    """Returns the shard maps of the weights that engines quantize, from maps of the weights before."""
    names = quantized_tensors(table)
    return EncodedMaps(EncodedSource(source, encoding, names), EncodedTarget(target, encoding, names))


def check_engine_blocks(table: ModelTable, target: ShardMap, encoding: Encoding, ranks: Iterable[int]) -> None:
    """Raises a UserError where engines cannot have such weights, or a layout cuts a block or a tile of a rank."""
    if encoding.tile and (table.config.experts or table.config.latent):
        raise UserError(
            "rollout.wire=int4: the engine stores experts and latent attention in other forms than shards of INT4, and "
            f"{table.config.architecture} has them. Write rollout.wire=fp8_block or fp8_channel."
        )
    encoded = encoded_maps(table, target, target, encoding).target
    for rank in ranks:
        encoded.shards(rank)
        for name, shard in target.shards(rank).items() if encoding.tile else ():
            if shard.pieces and shard.pieces[0].tensor in encoded.encoded:
                _check_tiles(name, shard.shape, encoding.tile)


def _check_tiles(name: str, shape: tuple[int, ...], tile: BlockSize | None) -> None:
    if tile and any(size % part for size, part in zip(shape, tile, strict=True)):
        raise UserError(
            f"{name}: a rank of the engine has {shape[0]} x {shape[1]} of it, and the kernel for rollout.wire=int4 "
            f"needs multiples of {tile[0]} x {tile[1]}. Choose a smaller tp in rollout.layout, or rollout.wire=cast."
        )


@dataclass(frozen=True)
class Encoded:
    """The encoded source of one part of a model on one rank."""

    tensors: Mapping[str, Tensor]
    """Parameters of the source, as a schedule expects them."""
    bytes_exchanged: int
    """Bytes of the largest magnitudes that the ranks have exchanged, in addition to the schedule's."""


class Encoder:
    """Encoder of one part of a model on one rank, used for every weight sync."""

    # Ranks agree on scales, and do not move the rows of shared blocks to one of them: that would send twice. A part is
    # encoded before it is sent, not message by message: so an element is quantized once for all its receivers.

    def __init__(self, part: EncodedPart, schedule: Schedule, dtype: torch.dtype) -> None:
        self._part, self._source, self._dtype, self._schedule = part, part.source, dtype, schedule
        self._encoding = part.source.encoding
        encoded = [name for name in part.tensors if name in part.source.encoded]
        # One mask for all tensors with the same boxes, such as one kind of each layer.
        masks: dict[Hashable, torch.Tensor] = {}
        for name in encoded:
            key = part.source.plain_key(name)
            if key not in masks:
                masks[key] = torch.from_numpy(np.ascontiguousarray(part.source.shared_blocks(name)))
        self._shared = {name: masks[part.source.plain_key(name)] for name in encoded}
        self.num_exchanged = sum(int(mask.sum()) for mask in self._shared.values())
        """Number of blocks that are distributed over ranks."""
        self._pieces: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
        for parameter, shard in part.source.plain_shards(schedule.rank).items():
            for piece in shard.pieces:
                if piece.tensor in self._shared:
                    self._pieces[piece.tensor].append((parameter, piece))

    @property
    def source_parameters(self) -> set[str]:
        """Parameters that are read before they are encoded."""
        read = {name for tensor in self._pieces if self._is_read(tensor) for name, _ in self._pieces[tensor]}
        scales = {self._source.scales_of(tensor) for tensor in self._pieces}
        values = {name + self._encoding.value_suffix for pieces in self._pieces.values() for name, _ in pieces}
        return read | (self._schedule.source_parameters - scales - values)

    def run(
        self,
        parameters: Mapping[str, Tensor],
        wait_for: Callable[[str], object],
        group: dist.ProcessGroup | None = None,
    ) -> Encoded:
        """Encodes what this rank sends; all ranks of the group call it together."""
        here = device.current_device()
        sent = self._schedule.source_parameters
        for name in self.source_parameters:
            wait_for(name)
        largest: dict[str, Tensor] = {}
        for tensor, pieces in self._pieces.items():
            if not self._is_read(tensor):
                continue
            shape = self._source.shape_of(tensor)
            largest[tensor] = torch.zeros(self._encoding.grid(shape), device=here)
            for parameter, piece in pieces:
                values = self._values(parameters, parameter, piece)
                add_largest(largest[tensor], values, piece.source, self._encoding.block(shape))
        self._exchange(largest, here, group)
        result = {name: tensor for name, tensor in parameters.items() if name in self._schedule.source_shapes}
        for name, shard in self._part.shards(self._schedule.rank).items():
            if shard.pieces[0].tensor in self._shared:
                dtype = self._encoding.dtype
                memory = torch.empty(shard.shape if name in sent else (), dtype=dtype, device=here)
                result[name] = memory.expand(shard.shape)  # what is not sent needs no memory
        for tensor, magnitudes in largest.items():
            scales = self._encoding.scales(magnitudes, self._dtype)
            result[self._source.scales_of(tensor)] = scales
            for parameter, piece in self._pieces[tensor]:
                name = parameter + self._encoding.value_suffix
                if name in sent:
                    values = self._values(parameters, parameter, piece)
                    encode_box(self._encoding, values, scales, piece.source, self._memory_of(result[name], piece))
        # Scales that this rank neither computes nor sends: `execute` requires all planned parameters in their shapes.
        for name, shape in self._schedule.source_shapes.items():
            if name not in result:
                result[name] = torch.empty((), device=here).expand(shape)
        return Encoded(result, 4 * self.num_exchanged)

    def _is_read(self, tensor: str) -> bool:
        """Returns whether this rank sends a part of a tensor, or others need its largest magnitudes."""
        names = {parameter + self._encoding.value_suffix for parameter, _ in self._pieces[tensor]}
        names.add(self._source.scales_of(tensor))
        return bool(names & self._schedule.source_parameters or self._shared[tensor].any())

    def _values(self, parameters: Mapping[str, Tensor], parameter: str, piece: Piece) -> Tensor:
        box = parameters[parameter].detach()[slices(piece.target)]
        return box.view(box_shape(piece.source)).to(self._dtype)

    def _memory_of(self, parameter: Tensor, piece: Piece) -> Tensor:
        start, stop = piece.target[-1]
        box = (*piece.target[:-1], (start // self._encoding.packed, stop // self._encoding.packed))
        return parameter[slices(box)].view(*box_shape(piece.source)[:-1], (stop - start) // self._encoding.packed)

    def _exchange(self, largest: Mapping[str, Tensor], here: torch.device, group: dist.ProcessGroup | None) -> None:
        """Maximizes the largest magnitudes of blocks that are distributed over ranks."""
        if not self.num_exchanged:
            return
        # All ranks go through the same tensors in the same order, with zeros for what they do not have.
        masks = {tensor: mask.to(here) for tensor, mask in self._shared.items() if mask.any()}
        parts = [
            largest[tensor][mask] if tensor in largest else torch.zeros(int(mask.sum()), device=here)
            for tensor, mask in masks.items()
        ]
        everyone = torch.cat(parts)
        dist.all_reduce(everyone, dist.ReduceOp.MAX, group)
        for (tensor, mask), part in zip(masks.items(), everyone.split([len(part) for part in parts]), strict=True):
            if tensor in largest:
                largest[tensor][mask] = part
