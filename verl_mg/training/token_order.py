"""Order of the tokens of a micro-batch on the ranks that share it.

With cp ranks, T packed tokens and context parallelism over heads, a rank has T / cp neighbouring tokens. Where keys and
values are exchanged instead, each sequence is cut into 2 * cp chunks, and rank r has chunks r and 2 * cp - 1 - r:
early tokens attend to few others and late ones to many, so that the ranks have the same work.

    cp2, a sequence of 8 tokens    rank 0: 0 1 . . . . 6 7    rank 1: . . 2 3 4 5 . .

A row whose first tokens another row has too has only the others packed, see `packed_sequences`:

    rows a b c d and a b x y    packed a b c d x y    places 0 1 2 3, 0 1 4 5    lengths 4 2    key_lengths 4 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class TokenShard:
    """This rank's part of the token axis of a micro-batch: cp shards, and outside attention each in tp parts."""

    tp: int  # number of tensor-parallel ranks
    cp: int  # number of context-parallel ranks that share the micro-batch
    tp_index: int = 0  # this rank's index among the tensor-parallel ranks
    cp_index: int = 0  # this rank's index among the ranks that share the micro-batch
    group: dist.ProcessGroup | None = None  # process group of the context-parallel ranks that share the micro-batch


@dataclass(frozen=True)
class TokenOrder:
    """Packed sequences and this rank's part of them, in host memory.

    A last sequence without rows, and padding at the end of the others, let the ranks have equally many tokens.
    """

    lengths: Tensor  # (n,) int64, packed tokens of each sequence
    places: Tensor  # (tokens of the rows,) int64, place of each of them among the T packed tokens
    local: Tensor  # (T / cp,) int64, places of this rank's tokens in its order
    zigzag: bool  # whether these are two chunks of each sequence, and not neighbouring tokens
    # (n,) int64, tokens of each sequence, with those that another one has packed; None for `lengths`.
    key_lengths: Tensor | None = None
    # (sum(key_lengths),) int64, place of each of them; None where each sequence has its own.
    keys: Tensor | None = None

    @property
    def total(self) -> int:
        """T, the number of packed tokens."""
        return int(self.lengths.sum())

    @property
    def occurrences(self) -> Tensor:
        """Number of rows that contain each of the T packed tokens: (T,) int64, 0 for padding."""
        return torch.bincount(self.places, minlength=self.total)

    def local_index(self, places: Tensor) -> Tensor:
        """Returns the indices of places among this rank's tokens, -1 where another rank has them: (m,) -> (m,)."""
        index = torch.full((self.total,), -1)
        index[self.local] = torch.arange(len(self.local))
        return index[places]


@dataclass(frozen=True)
class SharedTokens:
    """First tokens of rows that other rows of the micro-batch have packed, in host memory."""

    rows: Tensor
    """(rows,) int64, the row that has the last one of them packed."""
    counts: Tensor
    """(rows,) int64, number of them; 0 in a row that is packed whole, and less in `rows` than in the row itself."""


def token_order(
    lengths: Tensor, shard: TokenShard, multiple: int = 1, zigzag: bool = False, shared: SharedTokens | None = None
) -> TokenOrder:
    """Returns the order of the tokens of a micro-batch, from the (rows,) lengths of its rows.

    `multiple` divides the tokens of each tensor-parallel rank, as products in FP8 need it. `shared` excludes `zigzag`.
    """
    zigzag = zigzag and shard.cp > 1
    assert not (zigzag and shared)
    chunks = 2 * shard.cp if zigzag else 1
    computed = lengths - shared.counts if shared else lengths
    padded = -(-computed // chunks) * chunks
    parts = lcm(shard.tp * shard.cp * multiple, chunks)
    total = int(padded.sum())
    # A micro-batch without rows has tokens too: its rank takes part in every collective of the layers.
    filler = -total % parts if total else parts
    last = torch.tensor([filler] if filler else [], dtype=torch.int64)
    # Padding is a sequence by itself, to which no token of a row attends.
    sequences = torch.cat([padded, last])
    starts = padded.cumsum(0) - padded
    places = torch.repeat_interleave(starts, computed) + _positions(computed)
    if shared:
        rows = _with_shared(places.split(computed.tolist()), shared)
        packed = computed > 0
        keys = [place for place, is_packed in zip(rows, packed.tolist(), strict=True) if is_packed]
        return TokenOrder(
            lengths=torch.cat([computed[packed], last]),
            places=torch.cat(rows),
            local=torch.arange(total + filler).chunk(shard.cp)[shard.cp_index],
            zigzag=False,
            key_lengths=torch.cat([lengths[packed], last]),
            keys=torch.cat([*keys, total + torch.arange(filler)]),
        )
    if zigzag:
        local = zigzag_tokens(sequences, shard.cp, shard.cp_index)
    else:
        local = torch.arange(total + filler).chunk(shard.cp)[shard.cp_index]
    return TokenOrder(sequences, places, local, zigzag)


def zigzag_tokens(lengths: Tensor, cp: int, cp_index: int) -> Tensor:
    """Returns the places of a rank's two chunks of each sequence: (T / cp,) int64.

    `lengths` (n,) int64 on the CPU are multiples of 2 * cp.
    """
    chunk = lengths // (2 * cp)
    numbers = torch.tensor([cp_index, 2 * cp - 1 - cp_index])
    starts = (lengths.cumsum(0) - lengths)[:, None] + chunk[:, None] * numbers
    sizes = chunk.repeat_interleave(2)
    return torch.repeat_interleave(starts.flatten(), sizes) + _positions(sizes)


def _with_shared(places: Sequence[Tensor], shared: SharedTokens) -> list[Tensor]:
    """Returns the places of all tokens of each row, from the places of the tokens after its shared ones."""
    rows = list(places)
    sources, counts = shared.rows.tolist(), shared.counts.tolist()
    # A source shares fewer tokens than the rows that share with it: in this order each source is complete.
    for row in sorted(range(len(rows)), key=counts.__getitem__):
        if counts[row]:
            rows[row] = torch.cat([rows[sources[row]][: counts[row]], rows[row]])
    return rows


def _positions(lengths: Tensor) -> Tensor:
    """Returns the position of each token in its sequence: (n,) -> (sum(lengths),)."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths)
