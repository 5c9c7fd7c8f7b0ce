"""Packed rows of a micro-batch as the module of `transformers` reads them, and the attention over them.

`transformers` lets a model's attention call a function by its registered name. `packed_attention` attends within each
packed sequence, so that no mask of all pairs of tokens exists, and exchanges tokens for heads between context-parallel
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from verl_mg.batch import Batch
from verl_mg.device import copy_to
from verl_mg.fsdp.vision import ImagePacker, PackedImages
from verl_mg.layout import Stage
from verl_mg.training.microbatch import MicroBatch, TokenShard, pack_rows, positions_of, token_order
from verl_mg.training.packed_attention import Scores, Sequences, attend, heads_of_rank, to_heads, to_tokens

WHOLE = Stage((), is_first=True, is_last=True)  # the only pipeline stage


@dataclass
class PackedRows(Sequences):
    """Description of packed sequences, which the attention of every layer reads."""

    lengths: Tensor  # (n,) int64 on the CPU, tokens of each sequence
    position_ids: Tensor  # (1, T / cp) int64, position of each of this rank's tokens in its sequence
    cu_seqlens_q: Tensor  # (n + 1,) int32, where each sequence begins, and the end
    # Ranks that share the micro-batch; None: only this one.
    cp_group: dist.ProcessGroup | None
    images: PackedImages | None = None  # images of the rows, for a vision-language module

    def __post_init__(self) -> None:
        self.key_lengths, self.cu_seqlens_kv = self.lengths, self.cu_seqlens_q
        self.max_seqlen_q = self.max_seqlen_kv = int(self.lengths.max())


def make_micro_batch(
    rows: Batch, shard: TokenShard, hidden_offset: int, device: torch.device, packer: ImagePacker | None = None
) -> MicroBatch[PackedRows]:
    """Packs rows, of which there may be none, into a micro-batch, for the rank that has a shard of its tokens."""
    order = token_order(rows.lengths, shard)
    packed = PackedRows(
        lengths=order.lengths,
        position_ids=copy_to(device, positions_of(order.lengths)[order.local][None]),
        cu_seqlens_q=copy_to(device, F.pad(order.lengths.cumsum(0), (1, 0)).int()),
        cp_group=shard.group,
        images=packer.pack(rows, order, shard, device) if packer else None,
    )
    return pack_rows(rows, order, packed, WHOLE, hidden_offset, device)


NAME = "packed_rows"  # name of the function in `transformers`' registry


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed: PackedRows | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention within each packed sequence: (1, heads, T / cp, d) -> (1, T / cp, heads, d_v).

    The names of arguments are `transformers`': `s_aux` are attention sinks (heads,). There are no attention weights.
    """
    assert packed is not None and attention_mask is None and query.shape[0] == 1
    heads, tokens, group = query.shape[1], query.shape[2], packed.cp_group
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    q, k, v = to_heads(q, k, v, group)
    sinks = None if s_aux is None else heads_of_rank(s_aux, group)
    context = to_tokens(attend(q, k, v, packed, Scores(scaling, sliding_window, softcap, sinks)), group)
    return context.view(1, tokens, heads, -1), None


# By name for the whole process; the sequences are an argument of `forward`, so that no model is patched.
AttentionInterface.register(NAME, packed_attention)
