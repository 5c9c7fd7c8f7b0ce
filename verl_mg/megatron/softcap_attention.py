"""Attention over packed sequences with a softcap, by torch's FlexAttention: one kernel that skips blocks of the mask.

FlexAttention (arXiv:2412.05496) generates its kernel when it is compiled, which happens on GPUs alone; not compiled, as
in tests, it computes the same with matrices. Scores are divided into blocks of 128 queries and 128 keys. Their mask is
computed in host memory from the lengths of the sequences, so that nothing of the size of the scores exists.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from verl_mg.device import copy_to
from verl_mg.megatron.core_version import fused

BLOCK = 128
"""Queries and keys of a block, torch's default."""

_flex_attention = fused(flex_attention)


def block_mask(lengths: Tensor, window: int | None, device: torch.device) -> BlockMask:
    """Describes which tokens see each other: earlier ones of the same sequence, and themselves.

    Args:
        lengths: (n,) int64 on the CPU, tokens of each sequence.
        window: number of tokens that a token attends to at most, itself included; None for all.
        device: device of queries and keys.
    """
    total = int(lengths.sum())
    tokens = torch.arange(total)
    first_seen = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    if window is not None:
        first_seen = torch.maximum(first_seen, tokens - window + 1)
    starts = torch.arange(0, total, BLOCK)
    ends = (starts + BLOCK).clamp(max=total)
    blocks = torch.arange(len(starts))
    # No token sees an earlier one than its predecessor does: the first and the last of a block are its bounds.
    seen = (blocks <= blocks[:, None]) & (ends > first_seen[starts][:, None])  # of [queries, keys], some pair
    whole = (blocks < blocks[:, None]) & (starts >= first_seen[ends - 1][:, None])  # every pair
    whole &= (ends - starts == BLOCK)[:, None]  # torch reads these without a mask
    partly = seen & ~whole
    listed = [_listed(blocks) for blocks in (partly, whole, partly.T, whole.T)]
    (in_part, part), (in_whole, full), (of_part, q_part), (of_whole, q_full) = (
        [copy_to(device, each) for each in pair] for pair in listed
    )
    on_device = copy_to(device, first_seen.int())

    def visible(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= on_device[query])

    return BlockMask(
        seq_lengths=(total, total),
        kv_num_blocks=in_part,
        kv_indices=part,
        full_kv_num_blocks=in_whole,
        full_kv_indices=full,
        q_num_blocks=of_part,
        q_indices=q_part,
        full_q_num_blocks=of_whole,
        full_q_indices=q_full,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )


def attend_with_softcap(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None, softcap: float
) -> Tensor:
    """Attends with scores z bounded as softcap * tanh(z / softcap) (Gemma 2, arXiv:2408.00118).

    Args:
        query: (T, heads, d).
        key: (T, kv_heads, d).
        value: (T, kv_heads, d_v).
        mask: which tokens see each other.
        scale: factor of scores; None for 1 / sqrt(d).
        softcap: the bound.

    Returns:
        (T, heads, d_v).
    """

    def bounded(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    context: Tensor = _flex_attention(q, k, v, score_mod=bounded, block_mask=mask, scale=scale, enable_gqa=True)
    return context[0].transpose(0, 1)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of true entries of each row of (n, n), and their columns, followed by the others'."""
    columns = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], columns.int()[None, None]
