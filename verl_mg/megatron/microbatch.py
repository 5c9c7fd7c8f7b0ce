"""Micro-batches of the Megatron backend: rows packed for this rank's stage, with rotary embeddings and routing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.device import copy_to
from verl_mg.layout import Stage
from verl_mg.megatron.balance_losses import RowsOfTokens
from verl_mg.megatron.multi_token import next_tokens
from verl_mg.megatron.packed_sequences import PackedSequences, describe_sequences
from verl_mg.megatron.routing import routed_experts
from verl_mg.training.microbatch import SHARED_TOKENS, SHARED_WITH, MicroBatch, pack_rows
from verl_mg.training.token_order import SharedTokens, TokenShard, token_order


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
    multi_token: bool = False,
    balanced: bool = False,
) -> MicroBatch[PackedSequences]:
    """Packs rows into a micro-batch, for the rank that has a shard of its tokens.

    Each stage reads the columns `routed_experts`, `shared_with` and `shared_tokens` if they are there, for others see
    `pack_rows`. `inverse_frequencies` are on the device of the result.
    """
    device = inverse_frequencies.device
    shared = SharedTokens(rows[SHARED_WITH], rows[SHARED_TOKENS]) if SHARED_TOKENS in rows and len(rows) else None
    order = token_order(rows.lengths, shard, multiple, zigzag, shared)
    packed = describe_sequences(order.lengths, inverse_frequencies, attention_scaling, order.key_lengths, order.keys)
    if order.zigzag:
        packed.keep(copy_to(device, order.local))
    packed.experts = routed_experts(rows, order, shard, replayed, device)
    # Routers see the tokens of one tensor-parallel rank.
    occurrences = order.occurrences[order.local].chunk(shard.tp)[shard.tp_index]
    packed.occurrences = copy_to(device, occurrences)
    packed.cp_group = shard.group
    if balanced:
        row_of = torch.full((order.total,), len(rows))
        row_of[order.places] = rows.sequence_ids
        # Padding counts as a row of infinite length, so its share in every mean is 0.
        lengths = torch.cat([rows.lengths.float(), torch.tensor([torch.inf])])
        of_rank = row_of[order.local].chunk(shard.tp)[shard.tp_index]
        packed.rows_of_tokens = RowsOfTokens(copy_to(device, of_rank), copy_to(device, lengths))
    if multi_token and stage.is_last:
        packed.next_tokens = next_tokens(rows, order, device)
    return pack_rows(rows, order, packed, stage, hidden_offset, device)
