"""Writing of a model's weights into a Hugging Face directory by all ranks, in contiguous runs.

box of whole rows         one run of the file, written by a rank that has it
box of some columns       row by row in the file: moved to ranks that have whole rows first, and written by these
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.checkpoint.hf_safetensors import CheckpointWriter
from verl_mg.reshard import execute, plan, schedule, split_into_chunks
from verl_mg.reshard.routing import assign_writes
from verl_mg.sharding.boxes import Box, Piece, Shard, full_box, slices
from verl_mg.sharding.shard_map import ExplicitShardMap, ShardMap
from verl_mg.training.runner import Runner

CHUNK_BYTES = 2**28  # bytes of whole rows that a rank has at a time


def write_weights(runner: Runner, writer: CheckpointWriter) -> None:
    """Writes all weights, adapters merged into them; all ranks of the job call it together."""
    rank, whole, served = dist.get_rank(), runner.shard_map(), runner.served_parameters()
    rows = whole_rows(whole, runner.table.tensor_index.transposed)
    current, values = "", torch.empty(0)
    for write in assign_writes(whole, rank):
        if write.tensor not in rows.tensors:
            if write.parameter != current:  # merging adapters takes time: once for each parameter
                current, values = write.parameter, served[write.parameter].detach()
            writer.write(write.tensor, write.box, values[slices(write.parameter_box)])
    node = device.ranks_of_a_node(dist.get_world_size())
    # Columns of a row from many ranks would be short runs in the file: they are moved into whole rows, chunk by chunk.
    for chunk in split_into_chunks(rows, rows.ranks, CHUNK_BYTES // runner.dtype.itemsize):
        moves = schedule(plan(whole, chunk, node), rank, runner.dtype)
        held: Mapping[str, Tensor] = {name: served[name] for name in moves.source_shapes}
        staged = {
            name: torch.empty(shape, dtype=runner.dtype, device=device.current_device())
            for name, shape in moves.target_shapes.items()
        }
        execute(moves, held, staged)
        for name, shard in chunk.shards(rank).items():
            writer.write(name, shard.pieces[0].source, staged[name])


def whole_rows(whole: ShardMap, transposed: Collection[str] = ()) -> ExplicitShardMap:
    """Returns the whole rows that ranks write of the tensors whose columns are distributed over ranks."""
    # Files have `transposed` tensors with their columns as contiguous rows; these are not among the result.
    shards: dict[int, dict[str, Shard]] = defaultdict(dict)
    split = {}
    for name, info in whole.tensors.items():
        replicas = whole.replicas(name)
        if name in transposed or all(_has_whole_rows(item.box, info.shape) for item in replicas):
            continue
        split[name] = info
        height, columns = info.shape[0], full_box(info.shape[1:])
        # The replicas of a box take turns from tensor to tensor, so that all of them write.
        writers = [item.ranks[info.position % len(item.ranks)] for item in replicas]
        for number, rank in enumerate(writers):
            start, stop = (height * n // len(writers) for n in (number, number + 1))
            if start < stop:
                shape = (stop - start, *info.shape[1:])
                shards[rank][name] = Shard(shape, (Piece(name, ((start, stop), *columns), full_box(shape)),))
    return ExplicitShardMap(shards, split)


def _has_whole_rows(box: Box, shape: tuple[int, ...]) -> bool:
    return box[1:] == full_box(shape[1:])
