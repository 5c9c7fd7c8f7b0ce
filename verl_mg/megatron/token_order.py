"""Order of the tokens of a micro-batch on the ranks that share it.

With cp ranks, T packed tokens and context parallelism over heads, a rank has T / cp neighbouring tokens. Where keys and
values are exchanged instead, each sequence is cut into 2 * cp chunks, and rank r has chunks r and 2 * cp - 1 - r:
early tokens attend to few others and late ones to many, so that the ranks have the same work.

    cp2, a sequence of 8 tokens    rank 0: 0 1 . . . . 6 7    rank 1: . . 2 3 4 5 . .
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from verl_mg.megatron.process_groups import TokenShard


@dataclass(frozen=True)
class TokenOrder:
    """Packed sequences and this rank's part of them, in host memory.

    A last sequence without rows, and padding at the end of the others, let the ranks have equally many tokens.
    """

    lengths: Tensor
    """(n,) int64, tokens of each packed sequence."""
    places: Tensor
    """(tokens of the rows,) int64, place of each of them among the T packed tokens."""
    local: Tensor
    """(T / cp,) int64, places of this rank's tokens in its order."""
    zigzag: bool
    """Whether these are two chunks of each sequence, and not neighbouring tokens."""

    @property
    def total(self) -> int:
        """T, the number of packed tokens."""
        return int(self.lengths.sum())

    def local_index(self, places: Tensor) -> Tensor:
        """Returns the indices of places among this rank's tokens, -1 for those of other ranks: (m,) -> (m,)."""
        index = torch.full((self.total,), -1)
        index[self.local] = torch.arange(len(self.local))
        return index[places]


def token_order(lengths: Tensor, shard: TokenShard, multiple: int = 1, zigzag: bool = False) -> TokenOrder:
    """Returns the order of the tokens of a micro-batch.

    Args:
        lengths: (rows,) int64, tokens of each row.
        shard: this rank's part of the tokens.
        multiple: number that divides the tokens of each tensor-parallel rank.
        zigzag: a rank has two chunks of every sequence, and not neighbouring tokens.
    """
    zigzag = zigzag and shard.cp > 1
    chunks = 2 * shard.cp if zigzag else 1
    padded = -(-lengths // chunks) * chunks
    parts = lcm(shard.tp * shard.cp * multiple, chunks)
    total = int(padded.sum())
    filler = -total % parts if total else parts
    sequences = torch.cat([padded, torch.tensor([filler] if filler else [], dtype=torch.int64)])
    starts = padded.cumsum(0) - padded
    places = torch.repeat_interleave(starts, lengths) + _positions(lengths)
    if zigzag:
        local = zigzag_tokens(sequences, shard.cp, shard.cp_index)
    else:
        local = torch.arange(total + filler).chunk(shard.cp)[shard.cp_index]
    return TokenOrder(sequences, places, local, zigzag)


def zigzag_tokens(lengths: Tensor, cp: int, cp_index: int) -> Tensor:
    """Returns the places of a rank's two chunks of each sequence: (T / cp,) int64.

    Args:
        lengths: (n,) int64, tokens of each sequence, multiples of 2 * cp.
        cp: number of ranks that share the sequences.
        cp_index: the rank's index among them.
    """
    chunk = lengths // (2 * cp)
    numbers = torch.tensor([cp_index, 2 * cp - 1 - cp_index])
    starts = (lengths.cumsum(0) - lengths)[:, None] + chunk[:, None] * numbers
    sizes = chunk.repeat_interleave(2)
    return torch.repeat_interleave(starts.flatten(), sizes) + _positions(sizes)


def _positions(lengths: Tensor) -> Tensor:
    """Returns the position of each token in its sequence: (n,) -> (sum(lengths),)."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths)
