"""Output layers of teachers on the ranks that train the student, with the vocabulary sharded as the student's.

A rank reads the rows of its part of the vocabulary from the teacher's directory, and nothing else of the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl_mg import device
from verl_mg.checkpoint.hf_safetensors import CheckpointReader
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.errors import UserError
from verl_mg.training.output_layer import OutputLayer


@dataclass(frozen=True)
class OutputHead:
    """Output layer of a language model in its directory."""

    tensor: str
    vocab: int  # number of tokens, padding of the tensor included
    hidden: int  # width of the last hidden states
    softcap: float | None = None  # bound of the logits, see `OutputLayer`
    scale: float = 1.0  # factor of the products of hidden states and weights


@dataclass(frozen=True)
class VocabularyShard:
    """Part of a vocabulary on one rank."""

    first: int
    """Id of its first token."""
    rows: int
    group: dist.ProcessGroup | None
    """Ranks with the other parts; None: the rank has the whole vocabulary."""


def load_teacher_layer(
    directory: ModelDirectory, head: OutputHead, dtype: torch.dtype, shard: VocabularyShard
) -> OutputLayer:
    """Reads a rank's part of a teacher's output layer."""
    place = device.current_device()
    # Models of one family pad their vocabularies differently: rows after the student's are left out, and the teacher's
    # distribution is over the student's tokens.
    weight = torch.empty(shard.rows, head.hidden, dtype=dtype, device=place)
    if shard.rows:
        with CheckpointReader(directory) as reader:
            box = ((shard.first, shard.first + shard.rows), (0, head.hidden))
            weight.copy_(reader.read(head.tensor, box))
    return OutputLayer(weight, shard.first, shard.rows, shard.group, head.softcap, scale=head.scale)


def check_vocabularies(teacher: OutputHead, student: OutputHead, key: str) -> None:
    """Checks that a teacher has all tokens of the student."""
    if teacher.vocab < student.vocab:
        raise UserError(
            f"{key}: the teacher has {teacher.vocab} tokens and the student {student.vocab}, to some of which it gives "
            "no probability. Write algorithm.divergence.top_k, or take another teacher."
        )
