"""Rows of a `Batch` as the input of one forward pass: packed tokens of a rank, and which of them are scored.

Rows that repeat the first tokens of other rows have two sequence columns (int64) in a micro-batch in which these tokens
are computed once, in all stages of a pipeline:

    shared_tokens   how many of the row's first tokens another row of the micro-batch computes; 0: it computes all
    shared_with     number of that row in the micro-batch; where it shares tokens too, these are fewer

Hidden states of such tokens score tokens of every row that shares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.batch import Batch, ColumnKind
from verl_mg.device import copy_to
from verl_mg.layout import Stage
from verl_mg.training.token_order import TokenOrder

SHARED_WITH, SHARED_TOKENS = "shared_with", "shared_tokens"
"""Columns of rows that share their first tokens, see above."""
ROUTED_EXPERTS = "routed_experts"  # token column with the experts that are prescribed for each token, layer by layer
TEACHER, TEACHER_HIDDEN, TEACHER_TOP = "teacher", "teacher_hidden", "teacher_top"
"""Columns of teachers: number of the row's teacher; its last hidden state (h,) of each token; log-probs and ids (2, k)
of the tokens that it finds likeliest in the place of each."""


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

    The first stage reads `tokens`, the last one `tokens` and `loss_mask`. `hidden_offset`: 1 where a hidden state
    predicts the next token, 0 for reward heads, which score the token itself.
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
    return MicroBatch(
        rows=rows,
        input_ids=copy_to(device, tokens[order.local][None]),
        packed=packed,
        hidden_index=copy_to(device, hidden_index[local_index]),
        targets=copy_to(device, tokens[order.places[token_index[local_index]]]),
        local_index=copy_to(device, local_index),
        token_index=token_index,
        sequence_ids=copy_to(device, rows.sequence_ids[token_index]),
    )
