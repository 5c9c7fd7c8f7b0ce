"""Transfers of quantized weights and of changes only, which `bench_reshard` measures too."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.reshard import Schedule, execute, plan, schedule
from verl_mg.reshard.delta_transfer import SentValues, apply_patches, transfer_changes
from verl_mg.reshard.encode import Encoder, encoded_maps
from verl_mg.reshard.encoding import Wire, encoding_of
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.weight_table import WeightTable

CHANGED = 0.02
"""Share of the elements that change before each transfer of changes."""


class Quantized:
    """Transfer of quantized weights, with its plan made; quantizing the shards is part of each run."""

    def __init__(
        self,
        weights: WeightTable,
        source_map: ShardMap,
        target_map: ShardMap,
        source: Mapping[str, Tensor],
        wire: Wire,
        bucket_bytes: int,
    ) -> None:
        """Plans the transfer and allocates the target."""
        encoding = encoding_of(wire)
        assert encoding, "not of weights that are cast"
        maps, rank, dtype = encoded_maps(weights, source_map, target_map, encoding), dist.get_rank(), torch.bfloat16
        moves = plan(maps.source, maps.target, dist.get_world_size())
        self._schedule = schedule(moves, rank, dtype, bucket_bytes)
        self._encoder, self._source = Encoder(maps.source, maps.target.tensors, self._schedule, dtype), source
        self._target = {}
        for name, shard in maps.target.shards(rank).items():
            wire_dtype = maps.target.tensors[shard.pieces[0].tensor].wire_dtype(dtype) if shard.pieces else dtype
            self._target[name] = torch.empty(shard.shape, dtype=wire_dtype)
        self._bound = moves.lower_bound(rank, dtype.itemsize)

    def run(self) -> int:
        """Fills the target and returns the bytes received, which are the lower bound of the encoded form."""
        encoded = self._encoder.run(self._source, lambda _: None)
        received = execute(self._schedule, encoded, self._target).bytes_received
        if received != self._bound:
            raise SystemExit(f"{received} bytes received, the lower bound is {self._bound}")
        return received + self._encoder.bytes_exchanged


class Changes:
    """Transfer of changed elements to a target that has the values before the change."""

    def __init__(self, made: Schedule, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        """Keeps the values that the target has."""
        self._schedule, self._source, self._target = made, source, target
        self._sent, self._turn = SentValues(), 0
        self._sent.keep_all(made, source)

    def prepare(self) -> None:
        """Flips the last bit of some elements, the same ones on all replicas of a parameter."""
        self._turn += 1
        for tensor in self._source.values():
            flat = tensor.detach().view(torch.int16).view(-1)
            generator = torch.Generator().manual_seed(self._turn)
            flat[torch.randint(0, flat.numel(), (int(CHANGED * flat.numel()),), generator=generator)] ^= 1

    def run(self) -> int:
        """Sends what has changed and applies it; returns the bytes received."""
        patches, traffic = transfer_changes(self._schedule, self._source, self._sent)
        if not apply_patches(patches, self._target):
            raise SystemExit("changes: a checksum is wrong")
        return traffic.bytes_received
