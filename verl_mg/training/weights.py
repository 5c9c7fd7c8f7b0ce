"""Weights of a runner: read from a Hugging Face directory, written into one, and as boxes of a checkpoint.

Reading: each rank reads contiguous runs of the files, and sends to others what it does not need itself. Writing:

    box of whole rows         one run of the file, written by a rank that has it
    box of some columns       row by row in the file: moved to ranks that have whole rows first, and written by these
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.checkpoint.hf_safetensors import CheckpointReader, CheckpointWriter, load_shards
from verl_mg.checkpoint.model_directory import ModelDirectories
from verl_mg.checkpoint.reader_assignment import ReaderShardMap
from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.reshard import execute, plan, schedule, split_into_chunks
from verl_mg.reshard.routing import assign_writes
from verl_mg.sharding.boxes import Box, Piece, Shard, box_shape, full_box, intersect, slices, translate_box
from verl_mg.sharding.model_table import SCORE
from verl_mg.sharding.shard_map import ExplicitShardMap, ShardMap
from verl_mg.training.runner import Runner

HEAD_SEED = 1  # seed of a value head that the checkpoint does not contain


def load_directory(
    runner: Runner,
    directories: ModelDirectories | None,
    dtype: torch.dtype,
    left_out: frozenset[str] = frozenset(),
) -> set[str]:
    """Fills the weights of a model from its directory; all ranks of the job call it together.

    Tensors that are `left_out` keep the values in the parameters' memory. Returns the names of this rank's parameters
    that have parts of them. A value head that the directory does not have is drawn.
    """
    rank, table, whole, parameters = dist.get_rank(), runner.table, runner.shard_map(), runner.parameters()
    shards = whole.shards(rank)
    if shards.keys() != parameters.keys():
        raise ValueError(f"table and model have different parameters: {sorted(shards.keys() ^ parameters.keys())}")
    read = {name: shard for name, shard in table.huggingface().items() if name not in left_out}
    head = _fresh_head(table.config.hidden) if SCORE in read else {}
    opened = directories or ModelDirectories()
    index = table.tensor_index
    directory = opened.open(runner.spec.path, read, frozenset(head), index)
    if rank == 0:
        opened.report_unread(runner.spec.path, table.huggingface().keys() | index.copies.keys())
    drawn = frozenset(head.keys() - directory.file_of.keys())
    readers = ReaderShardMap(whole, directory.file_of)
    reader = CheckpointReader(directory, head)
    load_shards(reader, readers.shards(rank), parameters)
    # Every rank draws the same head by its seed, and fills its padding: neither is moved.
    load_shards(reader, {name: _not_in_files(shard, drawn) for name, shard in shards.items()}, parameters)
    moves = plan(readers, whole, device.ranks_of_a_node(dist.get_world_size()), keep=drawn | left_out)
    # The parameters are source and target: a box that a rank has read itself stays where it is.
    with _in_one_memory(parameters) as memory:
        execute(schedule(moves, rank, dtype), memory, memory)
    return {name for name, shard in shards.items() if any(piece.tensor in left_out for piece in shard.pieces)}


def _fresh_head(hidden: int) -> dict[str, Tensor]:
    """Draws a value head of deviation 1 / (h + 1), so that first values are near 0 (arXiv:2009.01325, appendix B)."""
    generator = torch.Generator().manual_seed(HEAD_SEED)
    return {SCORE: torch.randn(1, hidden, generator=generator) / (hidden + 1)}


@contextmanager
def _in_one_memory(parameters: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    """Context manager: the parameters, or copies in host memory where only some are there, which are written back."""
    # A message has values of several parameters, and is received in the kind of memory that it was sent from.
    if len({tensor.device.type for tensor in parameters.values()}) < 2:
        yield parameters
        return
    copies = {name: tensor.detach().cpu() for name, tensor in parameters.items()}
    yield copies
    with torch.no_grad():
        for name, tensor in parameters.items():
            if tensor.device != copies[name].device:
                tensor.copy_(copies[name])


def _not_in_files(shard: Shard, drawn: frozenset[str]) -> Shard:
    """Returns the padding of a shard, and its pieces of tensors that are drawn instead of read."""
    return replace(shard, pieces=tuple(piece for piece in shard.pieces if piece.tensor in drawn))


WEIGHTS = "weights"  # namespace of the weights in a checkpoint


def weights(runner: Runner) -> Iterator[StoredBox]:
    """Yields all trained weights of this rank, as views of the memory that the model computes with."""
    shards = runner.trained_shards()
    for name, parameter in runner.trained().items():
        yield from stored_boxes(WEIGHTS, shards[name], parameter.detach(), full_box(tuple(parameter.shape)))


def restore_weights(runner: Runner, fill: Callable[[StoredBox], None]) -> None:
    """Restores all trained weights of this rank by `fill`, for a model without an optimizer."""
    for part in weights(runner):
        fill(part)
    runner.unrestored -= runner.trained().keys()


def stored_boxes(namespace: str, shard: Shard, values: Tensor, at: Box) -> Iterator[StoredBox]:
    """Yields the values in a box `at` of a shard as boxes of the checkpoint's tensors."""
    origin = full_box(box_shape(at))
    for piece in shard.pieces:
        common = intersect(at, piece.target)
        if common is not None:
            box, part = piece.source_of(common), values[slices(translate_box(common, at, origin))]
            yield StoredBox(namespace, piece.tensor, box, part.view(box_shape(box)))


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
    plan_of_rows = plan(whole, rows, device.ranks_of_a_node(dist.get_world_size()))
    # Columns of a row from many ranks would be short runs in the file: they are moved into whole rows, chunk by chunk.
    for chunk in split_into_chunks(rows, rows.ranks, CHUNK_BYTES // runner.dtype.itemsize):
        moves = schedule(plan_of_rows, rank, runner.dtype, tensors=chunk.tensors)
        held: Mapping[str, Tensor] = {name: served[name] for name in moves.source_shapes}
        staged = {
            name: torch.empty(shape, dtype=rows.tensors[name].wire_dtype(runner.dtype), device=device.current_device())
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
        if name in transposed or all(item.box[1:] == full_box(info.shape[1:]) for item in replicas):
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
