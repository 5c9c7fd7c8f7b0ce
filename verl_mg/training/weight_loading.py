"""Loading of a Hugging Face directory into the ranks of a model: each box is read from disk once in all.

reader of a box   file -> its parameter -> the parameters of the other replicas, over the process group
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.checkpoint.hf_safetensors import CheckpointReader, load_shards
from verl_mg.checkpoint.model_directory import ModelDirectories
from verl_mg.checkpoint.reader_assignment import ReaderShardMap
from verl_mg.reshard import execute, plan, schedule
from verl_mg.sharding.boxes import Piece, Shard
from verl_mg.sharding.model_table import SCORE
from verl_mg.training.runner import Runner

HEAD_SEED = 1  # seed of a value head that the checkpoint does not contain


def load_directory(
    runner: Runner,
    model_dir: Path,
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
    directory = opened.open(model_dir, read, frozenset(head), table.tensor_index.stacked)
    drawn = frozenset(head.keys() - directory.file_of.keys())
    readers = ReaderShardMap(whole, directory.file_of)
    with CheckpointReader(directory, head) as reader:
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
    pieces: tuple[Piece, ...] = tuple(piece for piece in shard.pieces if piece.tensor in drawn)
    return Shard(shard.shape, pieces, shard.padding)
