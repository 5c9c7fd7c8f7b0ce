"""Output layers of language models whose vocabulary is sharded over tensor-parallel ranks, in chunks of tokens.

Teachers' output layers are on the ranks that train the student, with the vocabulary sharded as the student's: a rank
reads the rows of its part of the vocabulary from the teacher's directory, and nothing else of the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.checkpoint.hf_safetensors import CheckpointReader
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.errors import UserError

CHUNK_BYTES = {"cuda": 2**30, "cpu": 2**24}
"""Bytes of one chunk of float32 logits on one rank, by the kind of device: large enough for efficient products."""


@dataclass(frozen=True)
class OutputLayer:
    """Output layer of one rank, which turns hidden states into log-probabilities."""

    weight: Tensor
    """(rows, h), this rank's vocabulary shard."""
    first_token: int
    """Token id of the shard's first row."""
    real_rows: int
    """Number of rows of the shard that are tokens; the others are padding."""
    group: dist.ProcessGroup | None
    """Tensor-parallel ranks; None: the rank has the whole vocabulary."""
    softcap: float | None = None
    """Bound c of logits z, as c * tanh(z / c) (Gemma 2, arXiv:2408.00118); None for none."""
    fused_gradient: bool = False
    """Add the gradient of the weight to its gradient buffer in the product, see `weight_gradients`."""
    scale: float = 1.0
    """Factor of the products of hidden states and weights."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes the float32 logits (n, real_rows) of hidden states (n, h)."""
        weight = self.weight[: self.real_rows]
        if hidden.device.type == "cuda" and hidden.dtype is not torch.float32:
            products = torch.mm(hidden, weight.T, out_dtype=torch.float32)  # sums are not rounded
        else:
            products = (hidden @ weight.T).float()
        if self.scale != 1:
            products *= self.scale
        if self.softcap is None:
            return products
        return products.div_(self.softcap).tanh_().mul_(self.softcap)

    def local_targets(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each target's row in this shard (0 where it is in another one), and whether it is in this shard."""
        local = targets - self.first_token
        is_local = (local >= 0) & (local < self.real_rows)
        return torch.where(is_local, local, 0), is_local

    def chunks(self, tokens: int, copies: int = 1) -> list[slice]:
        """Divides tokens into chunks whose logits have at most CHUNK_BYTES, in `copies` tensors of their size."""
        # By the rows with padding, of which all ranks have equally many: so they take part in equally many collectives.
        size = max(1, CHUNK_BYTES[self.weight.device.type] // (4 * len(self.weight) * copies))
        return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Divides logits by the temperature, in place."""
    return logits if temperature == 1 else logits.div_(temperature)


def row_max(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the largest logit of each token over all shards: (n, real_rows) -> (n,)."""
    # A shard that is all padding has no maximum.
    highest = logits.amax(-1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    if group is not None and group.size() > 1:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return highest


def sum_over(sums: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Adds the sums of all shards, in place."""
    if group is not None and group.size() > 1:
        dist.all_reduce(sums, group=group)
    return sums


def log_normalizer(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the logarithm of the sum of exponentials over all shards: (n, real_rows) -> (n,)."""
    highest = row_max(logits, group)
    return highest + sum_over((logits - highest[:, None]).exp_().sum(-1), group).log()


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
