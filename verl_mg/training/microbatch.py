"""Rows of a `Batch` as the input of one forward pass: packed tokens of a rank, and which of them are scored.

Rows that repeat the first tokens of other rows have two sequence columns (int64) in a micro-batch in which these tokens
are computed once, in all stages of a pipeline:

    shared_tokens   how many of the row's first tokens another row of the micro-batch computes; 0: it computes all
    shared_with     number of that row in the micro-batch; where it shares tokens too, these are fewer

    rows a b c d and a b x y    packed a b c d x y    places 0 1 2 3, 0 1 4 5    lengths 4 2    key_lengths 4 4

Hidden states of such tokens score tokens of every row that shares them, see `packed_sequences`.

With cp ranks, T packed tokens and context parallelism over heads, a rank has T / cp neighbouring tokens. Where keys and
values are exchanged instead, each sequence is cut into 2 * cp chunks, and rank r has chunks r and 2 * cp - 1 - r:
early tokens attend to few others and late ones to many, so that the ranks have the same work.

    cp2, a sequence of 8 tokens    rank 0: 0 1 . . . . 6 7    rank 1: . . 2 3 4 5 . .
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from verl_mg.batch import SUPPORT_IDS, SUPPORT_SIZES, Batch, ColumnKind, entries_of
from verl_mg.device import copy_to
from verl_mg.layout import Stage
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor
else:
    torch = lazy_import("torch")

SHARED_WITH, SHARED_TOKENS = "shared_with", "shared_tokens"
"""Columns of rows that share their first tokens, see above."""
ROUTED_EXPERTS = "routed_experts"  # token column with the experts that are prescribed for each token, layer by layer
TEACHER, TEACHER_HIDDEN, TEACHER_TOP = "teacher", "teacher_hidden", "teacher_top"
"""Columns of teachers: number of the row's teacher; its last hidden state (h,) of each token; log-probs and ids (2, k)
of the tokens that it finds likeliest in the place of each."""
SAMPLER_TOP = "sampler_top"  # token column like TEACHER_TOP, of the engine that sampled
BITS = 32  # of a word of `Support.bits`
EXCLUDED = -1e9
"""Logit of tokens that are no candidates: their probability is 0, and products with it are finite, unlike -inf."""


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

    rows: Tensor  # (rows,) int64, the row that has the last one of them packed
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
    places = torch.repeat_interleave(starts, computed) + positions_of(computed)
    neighbouring = torch.arange(total + filler).chunk(shard.cp)[shard.cp_index]
    if shared:
        rows = _with_shared(places.split(computed.tolist()), shared)
        packed = computed > 0
        keys = [place for place, is_packed in zip(rows, packed.tolist(), strict=True) if is_packed]
        return TokenOrder(
            lengths=torch.cat([computed[packed], last]),
            places=torch.cat(rows),
            local=neighbouring,
            zigzag=False,
            key_lengths=torch.cat([lengths[packed], last]),
            keys=torch.cat([*keys, total + torch.arange(filler)]),
        )
    local = zigzag_tokens(sequences, shard.cp, shard.cp_index) if zigzag else neighbouring
    return TokenOrder(sequences, places, local, zigzag)


def zigzag_tokens(lengths: Tensor, cp: int, cp_index: int) -> Tensor:
    """Returns the places, (T / cp,) int64, of a rank's two chunks of sequences whose lengths 2 * cp divides."""
    chunk = lengths // (2 * cp)
    numbers = torch.tensor([cp_index, 2 * cp - 1 - cp_index])
    starts = (lengths.cumsum(0) - lengths)[:, None] + chunk[:, None] * numbers
    sizes = chunk.repeat_interleave(2)
    return torch.repeat_interleave(starts.flatten(), sizes) + positions_of(sizes)


def _with_shared(places: Sequence[Tensor], shared: SharedTokens) -> list[Tensor]:
    """Returns the places of all tokens of each row, from the places of the tokens after its shared ones."""
    rows = list(places)
    sources, counts = shared.rows.tolist(), shared.counts.tolist()
    # A source shares fewer tokens than the rows that share with it: in this order each source is complete.
    for row in sorted(range(len(rows)), key=counts.__getitem__):
        if counts[row]:
            rows[row] = torch.cat([rows[sources[row]][: counts[row]], rows[row]])
    return rows


def positions_of(lengths: Tensor) -> Tensor:
    """Returns the position of each token in its sequence: (n,) -> (sum(lengths),)."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths)


@dataclass(frozen=True)
class Support:
    """Candidates of the draws of tokens, which their distributions are limited to; on the device of the logits.

    Of three tokens the first had candidates 5 and 9, the second all of the vocabulary, and the third candidate 3:

        limited  [true, false, true]    ends  [0, 2, 2, 3]    tokens  [0, 0, 2]    ids  [5, 9, 3]
    """

    limited: Tensor  # (m,) bool, false where all of the vocabulary were candidates
    ends: Tensor  # (m + 1,) int64 in host memory, where the candidates of each token begin, and the end
    tokens: Tensor  # (c,) int32, the token of each candidate
    ids: Tensor  # (c,) int32, its id in the vocabulary

    @classmethod
    def of(cls, sizes: Tensor, ids: Tensor, places: Tensor, device: torch.device) -> Support:
        """Returns the candidates of the tokens at `places`, from the columns SUPPORT_SIZES and SUPPORT_IDS."""
        counts, entries = sizes[places].long(), entries_of(sizes.long(), places)
        tokens = torch.arange(len(places), dtype=torch.int32).repeat_interleave(counts)
        ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        return cls(copy_to(device, counts > 0), ends, copy_to(device, tokens), copy_to(device, ids[entries]))

    def limit(self, values: Tensor, chunk: slice, first_token: int, excluded: float = EXCLUDED) -> Tensor:
        """Replaces the values (tokens, rows) of a chunk's tokens that are no candidates by `excluded`, in place.

        The rows are the part of the vocabulary that begins with `first_token`.
        """
        start, stop = self.ends[[chunk.start, chunk.stop]].tolist()
        tokens, rows = self.tokens[start:stop].long() - chunk.start, self.ids[start:stop].long() - first_token
        is_local = (rows >= 0) & (rows < values.shape[1])
        tokens, rows = tokens[is_local], rows[is_local]
        kept = values[tokens, rows]
        values.masked_fill_(self.limited[chunk, None], excluded)
        values[tokens, rows] = kept
        return values

    def bits(self, chunk: slice, first_token: int, rows: int) -> Tensor:
        """Returns the candidates of a chunk's tokens among some rows of the vocabulary, (tokens, words) int32.

        Bit i of word j is row 32 j + i. Of a token without candidates all bits are set.
        """
        start, stop = self.ends[[chunk.start, chunk.stop]].tolist()
        tokens, local = self.tokens[start:stop].long() - chunk.start, self.ids[start:stop].long() - first_token
        words = max(1, -(-rows // BITS))
        bits = torch.where(self.limited[chunk, None], 0, -1).int().repeat(1, words)
        bit = torch.where((local >= 0) & (local < rows), 1 << (local % BITS), 0).int()
        # A sum of different bits, in any order.
        bits.view(-1).scatter_add_(0, tokens * words + (local // BITS).clamp(0, words - 1), bit)
        return bits


class SequenceDescription(Protocol):
    """Description of packed sequences that the attention of a backend reads."""

    cp_group: dist.ProcessGroup | None  # ranks that share the micro-batch


Packed = TypeVar("Packed", bound=SequenceDescription)


@dataclass(frozen=True)
class MicroBatch(Generic[Packed]):
    """Packed rows on the device of a context-parallel rank.

    T is the number of tokens of the rows, those that rows share counted once, padded so that ranks have equally many;
    this rank has T / cp, see `token_order`.
    Of the n scored tokens (those under the loss mask, except a row's first) it scores the m whose hidden states it has.
    n is 0 except on the last pipeline stage: the others do not have the loss mask.

    Rows a b c d and e f g, of which c d f g are scored, on cp2 (T = 8, one token of padding):

                     rank 0    rank 1
        input_ids    a b c d   e f g 0
        hidden_index 1 2       0 1        the hidden state of b scores c
        targets      c d       f g
        local_index  0 1       2 3        of the scored tokens c d f g
        token_index  2 3 5 6   2 3 5 6    in a b c d e f g
        sequence_ids 0 0 1 1   0 0 1 1
    """

    rows: Batch  # rows of the micro-batch, with the columns of this rank's pipeline stage
    input_ids: Tensor  # (1, T / cp) int64, this rank's tokens; zeros on a stage that neither embeds nor scores them
    packed: Packed  # description of the sequences
    hidden_index: Tensor  # (m,) indices in this rank's tokens of the hidden states that score
    targets: Tensor  # (m,) int64 token ids that are scored on this rank
    local_index: Tensor  # (m,) indices of these among the n scored tokens
    token_index: Tensor  # (n,) int64 on the CPU, indices of the scored tokens in the token columns of `rows`
    sequence_ids: Tensor  # (n,) index of the row of each scored token
    support: Support | None = None  # candidates of the m tokens; None where the rows have none

    def local_column(self, name: str) -> Tensor:
        """Returns a column of the batch at the tokens that are scored on this rank, (m, ...) on the device."""
        column = self.rows[name]
        if self.rows.kind(name) is ColumnKind.SEQUENCE:
            column = self.rows.expand_to_tokens(column)
        return copy_to(self.targets.device, column[self.token_index])[self.local_index]


def pack_rows(
    rows: Batch, order: TokenOrder, packed: Packed, stage: Stage, hidden_offset: int, device: torch.device
) -> MicroBatch[Packed]:
    """Packs rows into a micro-batch, for the rank that has a shard of its tokens.

    The first stage reads `tokens`, the last one `tokens`, `loss_mask` and the candidates, where there are any.
    `hidden_offset`: 1 where a hidden state predicts the next token, 0 for reward heads, which score the token itself.
    """
    tokens = torch.zeros(order.total, dtype=torch.int64)
    if stage.is_first or stage.is_last:
        tokens[order.places] = rows["tokens"]
        assert tokens[order.places].equal(rows["tokens"]), "rows share tokens that differ"
    token_index = torch.empty(0, dtype=torch.int64)
    if stage.is_last:
        # A row's first token has no hidden state before it, so nothing scores it.
        token_index = (rows["loss_mask"] & (rows.positions > 0)).nonzero().flatten()
    hidden_index = order.local_index(order.places[token_index - hidden_offset])
    local_index = (hidden_index >= 0).nonzero().flatten()
    local_tokens, support = token_index[local_index], None
    if SUPPORT_IDS in rows:
        support = Support.of(rows[SUPPORT_SIZES], rows[SUPPORT_IDS], local_tokens, device)
    return MicroBatch(
        rows=rows,
        input_ids=copy_to(device, tokens[order.local][None]),
        packed=packed,
        hidden_index=copy_to(device, hidden_index[local_index]),
        targets=copy_to(device, tokens[order.places[local_tokens]]),
        local_index=copy_to(device, local_index),
        token_index=token_index,
        sequence_ids=copy_to(device, rows.sequence_ids[token_index]),
        support=support,
    )
