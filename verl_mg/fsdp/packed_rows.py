"""Rows of a micro-batch as the module of `transformers` reads them, and the attention over packed ones.

`transformers` lets a model's attention call a function by its registered name. `packed_attention` attends within each
packed sequence, so that no mask of all pairs of tokens exists, and exchanges tokens for heads between context-parallel
ranks. A module that is not right so, see `family_check`, is called for each row by itself, with its own attention:

    rows a b c and d e     packed: one call a b c d e     unpacked: calls a b c, d e, and on this rank one more, where
                                                          another rank has three rows: all make as many calls
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
from verl_mg.training.routed_experts import routed_experts

WHOLE = Stage((), is_first=True, is_last=True)  # the only pipeline stage


FILLER = torch.zeros(1, dtype=torch.int64)  # tokens of a call without a row


@dataclass(frozen=True)
class ModuleCall:
    """Arguments of one call of the module."""

    input_ids: Tensor  # (1, t) int64
    options: Mapping[str, Any]  # arguments by which a module knows where packed rows begin; none for a single row
    images: PackedImages | None  # images of the rows, for a vision-language module
    experts: Mapping[int, Tensor] | None = None  # prescribed experts of the tokens by layer, see `RoutingReplay`


@dataclass
class PackedRows(Sequences):
    """Description of packed sequences, which the attention of every layer reads."""

    lengths: Tensor  # (n,) int64 on the CPU, tokens of each sequence
    position_ids: Tensor  # (1, T / cp) int64, position of each of this rank's tokens in its sequence
    cu_seqlens_q: Tensor  # (n + 1,) int32, where each sequence begins, and the end
    # Ranks that share the micro-batch; None: only this one.
    cp_group: dist.ProcessGroup | None
    # Their outputs, one after another, begin with the outputs of this rank's tokens.
    calls: tuple[ModuleCall, ...] = ()
    # Modules whose attention has read this description.
    attended: set[nn.Module] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.key_lengths, self.cu_seqlens_kv = self.lengths, self.cu_seqlens_q
        self.max_seqlen_q = self.max_seqlen_kv = int(self.lengths.max())

    def options(self) -> dict[str, Any]:
        """Returns the further arguments by which layers, also with a state, know where rows begin."""
        options: dict[str, Any] = {"position_ids": self.position_ids}
        if self.cp_group is None:
            numbers = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
            options["seq_idx"] = copy_to(self.position_ids.device, numbers.int()[None])
            options |= {"cu_seq_lens_q": self.cu_seqlens_q, "cu_seq_lens_k": self.cu_seqlens_kv}
            options |= {"max_length_q": self.max_seqlen_q, "max_length_k": self.max_seqlen_kv}
        return options


@dataclass(frozen=True)
class RowsReader:
    """Makes the micro-batches of one module."""

    hidden_offset: int  # see `ModelSpec`
    is_packed: bool  # whether the module is called for packed rows, or for each row by itself
    packer: ImagePacker | None = None  # for a vision-language module
    replayed: tuple[int, ...] = ()  # layers for which rows may prescribe experts

    def micro_batch(self, rows: Batch, shard: TokenShard, device: torch.device, calls: int) -> MicroBatch[PackedRows]:
        """Packs rows, of which there may be none, for the rank that has a shard of their tokens.

        `calls`: calls of the module for unpacked rows, at least as many as rows.
        """
        order = token_order(rows.lengths, shard)
        packed = PackedRows(
            lengths=order.lengths,
            position_ids=copy_to(device, positions_of(order.lengths)[order.local][None]),
            cu_seqlens_q=copy_to(device, F.pad(order.lengths.cumsum(0), (1, 0)).int()),
            cp_group=shard.group,
        )
        micro = pack_rows(rows, order, packed, WHOLE, self.hidden_offset, device)
        if self.is_packed:
            images = self.packer.pack(rows, order, shard, device) if self.packer else None
            experts = routed_experts(rows, order, shard, self.replayed, device)
            packed.calls = (ModuleCall(micro.input_ids, packed.options(), images, experts),)
        else:
            packed.calls = tuple(self._each_row(rows, shard, device, calls))
        return micro

    def _each_row(self, rows: Batch, shard: TokenShard, device: torch.device, calls: int) -> Iterator[ModuleCall]:
        for number in range(calls):
            row = rows.select([number] if number < len(rows) else [])
            tokens = row["tokens"] if len(row) else FILLER
            order = token_order(row.lengths, shard)
            images = self.packer.pack(row, order, shard, device) if self.packer else None
            experts = routed_experts(row, order, shard, self.replayed, device)
            yield ModuleCall(copy_to(device, tokens[None]), {}, images, experts)


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
    if packed is None or attention_mask is not None:
        raise TypeError("its layers do not pass on to attention where rows begin")
    assert query.shape[0] == 1
    packed.attended.add(module)
    heads, tokens, group = query.shape[1], query.shape[2], packed.cp_group
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    q, k, v = to_heads(q, k, v, group)
    sinks = None if s_aux is None else heads_of_rank(s_aux, group)
    context = to_tokens(attend(q, k, v, packed, Scores(scaling, sliding_window, softcap, sinks)), group)
    return context.view(1, tokens, heads, -1), None


# By name for the whole process; the sequences are an argument of `forward`, so that no model is patched.
AttentionInterface.register(NAME, packed_attention)
