"""Rows of a `Batch` as the input of one forward pass, and the inputs of losses from its output.

Rows that repeat the first tokens of other rows have two sequence columns (int64) in a micro-batch in which these tokens
are computed once, in all stages of a pipeline:

    shared_tokens   how many of the row's first tokens another row of the micro-batch computes; 0: it computes all
    shared_with     number of that row in the micro-batch; where it shares tokens too, these are fewer

Hidden states of such tokens score tokens of every row that shares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_mg.algorithms.losses import Metrics
from verl_mg.batch import Batch, ColumnKind
from verl_mg.device import copy_to
from verl_mg.layout import Stage
from verl_mg.megatron.packed_sequences import PackedSequences, describe_sequences
from verl_mg.megatron.process_groups import TokenShard
from verl_mg.megatron.routing import COLUMN, routed_experts
from verl_mg.megatron.token_order import SharedTokens, token_order
from verl_mg.renamed import renamed_attribute

SHARED_WITH, SHARED_TOKENS = "shared_with", "shared_tokens"
"""Columns of rows that share their first tokens, see above."""


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows on the device of a context-parallel rank.

    T is the number of tokens of the rows, those that rows share counted once, padded so that ranks have equally many;
    this rank has T / cp, see `token_order`.
    Of the n scored tokens (those under the loss mask, except a row's first) it scores the m whose hidden states it has.
    n is 0 except on the last pipeline stage: the others do not have the loss mask.
    """

    rows: Batch
    """Rows of the micro-batch, with the columns of this rank's pipeline stage."""
    input_ids: Tensor
    """(1, T / cp) int64, this rank's tokens; zeros on a stage that neither embeds nor scores them."""
    packed: PackedSequences
    """Description of the sequences."""
    hidden_index: Tensor
    """(m,) indices in this rank's tokens of the hidden states that score."""
    targets: Tensor
    """(m,) int64 token ids that are scored on this rank."""
    local_index: Tensor
    """(m,) indices of these among the n scored tokens."""
    token_index: Tensor
    """(n,) int64 on the CPU, indices of the scored tokens in the token columns of `rows`."""
    sequence_ids: Tensor
    """(n,) index of the row of each scored token."""


def make_micro_batch(
    rows: Batch,
    inverse_frequencies: Tensor,
    attention_scaling: float,
    shard: TokenShard,
    stage: Stage,
    hidden_offset: int = 1,
    replayed: Sequence[int] = (),
    multiple: int = 1,
    zigzag: bool = False,
) -> MicroBatch:
    """Packs rows into a micro-batch, for the rank that has a shard of its tokens.

    Args:
        rows: rows of the micro-batch; may be empty. The first stage reads `tokens`, the last one `tokens` and
            `loss_mask`, each one `routed_experts`, `shared_with` and `shared_tokens` if they are there.
        inverse_frequencies: (rotary width / 2,) float32 on the device, see `describe_sequences`.
        attention_scaling: factor of cosines and sines of rotary embeddings.
        shard: this rank's part of the tokens.
        stage: this rank's pipeline stage.
        hidden_offset: offset from a token to the hidden state that scores it: 1 for language-model heads, whose hidden
            state predicts the next token; 0 for reward heads.
        replayed: layers of the column `routed_experts`.
        multiple: number that divides the tokens of each rank outside attention, see `token_multiple`.
        zigzag: a rank has two chunks of each sequence, see `token_order`.
    """
    device = inverse_frequencies.device
    shared = SharedTokens(rows[SHARED_WITH], rows[SHARED_TOKENS]) if SHARED_TOKENS in rows and len(rows) else None
    order = token_order(rows.lengths, shard, multiple, zigzag, shared)
    tokens = torch.zeros(order.total, dtype=torch.int64)
    if stage.is_first or stage.is_last:
        tokens[order.places] = rows["tokens"]
        assert tokens[order.places].equal(rows["tokens"]), "rows share tokens that differ"
    token_index = torch.empty(0, dtype=torch.int64)
    if stage.is_last:
        token_index = (rows["loss_mask"] & (rows.positions > 0)).nonzero().flatten()
    hidden_index = order.local_index(order.places[token_index - hidden_offset])
    local_index = (hidden_index >= 0).nonzero().flatten()
    packed = describe_sequences(order.lengths, inverse_frequencies, attention_scaling, order.key_lengths, order.keys)
    if order.zigzag:
        packed.keep(copy_to(device, order.local))
    packed.experts = routed_experts(rows, order, shard, replayed, device)
    packed.cp_group = shard.group
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


LossOutput = tuple[Tensor, Metrics]
"""Result of a loss function: the loss of each scored token, (n,) with gradients, and metrics (n,) by name."""


@dataclass(frozen=True)
class LossInputs:
    """Scored tokens of a micro-batch as the input of a loss function; all tensors are flat, (n,).

    `inputs["name"]` is a column of the batch; a sequence column is expanded to its tokens.
    """

    output: Tensor
    """Output of the model with gradients: log-probs and entropy (2, n), or values (1, n)."""
    mask: Tensor
    """True for every token, (n,) bool."""
    sequence_ids: Tensor
    """Row of each token in the micro-batch, (n,) int64."""
    columns: Mapping[str, Tensor]
    """Columns of the batch at the scored tokens, (n, ...) by name."""

    @property
    def logprobs(self) -> Tensor:
        """Log-probs of the tokens at the sampling temperature, in nats, with gradients."""
        return self.output[0]

    @property
    def entropy(self) -> Tensor:
        """Entropy of the distribution that each token was sampled from, in nats, with gradients."""
        return self.output[1]

    @property
    def values(self) -> Tensor:
        """Outputs of the value head, with gradients; the column of earlier values is `inputs["values"]`."""
        return self.output[0]

    @property
    def old_logprobs(self) -> Tensor:
        """Log-probs before the first update on the batch, in nats.

        A batch without this column is used for one update: they are `logprobs`, as constants.
        """
        return self.columns["old_logprobs"] if "old_logprobs" in self.columns else self.logprobs.detach()

    @property
    def ref_logprobs(self) -> Tensor:
        """Log-probs of the reference policy, in nats."""
        return self.columns["ref_logprobs"]

    @property
    def advantages(self) -> Tensor:
        """Advantages of the tokens."""
        return self.columns["advantages"]

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns


def loss_tokens(micro: MicroBatch, output: Tensor) -> LossInputs:
    """Returns the input of a loss function.

    Args:
        micro: the micro-batch.
        output: output of the model for its scored tokens, (2, n), or (1, n) with a value head.
    """
    columns = {}
    for name in micro.rows.names():
        if name in (COLUMN, SHARED_WITH, SHARED_TOKENS):  # not of a loss; of the first here are the stage's layers only
            continue
        column = micro.rows[name]
        if micro.rows.kind(name) is ColumnKind.SEQUENCE:
            column = micro.rows.expand_to_tokens(column)
        columns[name] = copy_to(output.device, column[micro.token_index])
    return LossInputs(
        output=output,
        mask=torch.ones_like(output[0], dtype=torch.bool),
        sequence_ids=micro.sequence_ids,
        columns=columns,
    )


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        raise renamed_attribute(__name__, name)
