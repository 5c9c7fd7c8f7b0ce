"""Loading of a Hugging Face directory into the ranks of a model: each box is read from disk once in all.

reader of a box   file -> its parameter -> the parameters of the other replicas, over the process group
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.checkpoint.hf_safetensors import CheckpointReader, load_shards
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.checkpoint.reader_assignment import ReaderShardMap
from verl_mg.reshard import execute, plan, schedule
from verl_mg.sharding.boxes import Piece, Shard
from verl_mg.sharding.shard_map import ShardMap


def load_weights(
    directory: ModelDirectory,
    whole: ShardMap,
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
    initial_values: Mapping[str, Tensor],
    left_out: frozenset[str] = frozenset(),
) -> None:
    """Fills the parameters of all ranks; all ranks of the job call it together.

    Args:
        directory: the model directory, without the files of tensors that are left out.
        whole: shards of all ranks.
        parameters: {parameter: tensor} of this rank; {} on a rank without any.
        dtype: dtype of the weights, except those that are float32 in every runtime.
        initial_values: values of tensors that the directory may not contain, such as a new value head.
        left_out: tensors that keep the values of the parameters' memory.

    Raises:
        UserError: on a reader whose file is damaged.
        ValueError: table and model differ, which is a programming error.
    """
    rank = dist.get_rank()
    shards = whole.shards(rank)
    if shards.keys() != parameters.keys():
        raise ValueError(f"table and model have different parameters: {sorted(shards.keys() ^ parameters.keys())}")
    drawn = frozenset(initial_values.keys() - directory.file_of.keys())
    readers = ReaderShardMap(whole, directory.file_of)
    with CheckpointReader(directory, initial_values) as reader:
        load_shards(reader, readers.shards(rank), parameters)
        load_shards(reader, {name: _not_in_files(shard, drawn) for name, shard in shards.items()}, parameters)
    moves = plan(readers, whole, device.ranks_of_a_node(dist.get_world_size()), keep=drawn | left_out)
    # The parameters are source and target: a box that a rank has read itself stays where it is.
    execute(schedule(moves, rank, dtype), parameters, parameters)


def _not_in_files(shard: Shard, drawn: frozenset[str]) -> Shard:
    """Returns the padding of a shard, and its pieces of tensors that are drawn instead of read."""
    pieces: tuple[Piece, ...] = tuple(piece for piece in shard.pieces if piece.tensor in drawn)
    return Shard(shard.shape, pieces, shard.padding)
