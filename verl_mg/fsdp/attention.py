"""Attention of `transformers`' modules over packed rows, with Ulysses context parallelism.

`transformers` lets a model's attention call a function by its registered name. This one attends within each packed
sequence, so that no mask of all pairs of tokens exists, and exchanges tokens for heads between context-parallel ranks
(DeepSpeed Ulysses, arXiv:2309.14509): outside attention a rank has neighbouring tokens and all heads, inside it has all
tokens and a part of the heads.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from verl_mg.fsdp.collectives import all_to_all
from verl_mg.fsdp.packed_rows import PackedRows
from verl_mg.training.flash_attention import takes_value_width
from verl_mg.training.flex_attention import attend_with_block_mask

NAME = "packed_rows"
"""Name of the function in `transformers`' registry."""


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
    """Computes causal attention within each packed sequence.

    Args:
        module: the attention module; not read.
        query: (1, heads, T / cp, d).
        key: (1, kv_heads, T / cp, d).
        value: (1, kv_heads, T / cp, d_v).
        attention_mask: None: the sequences say what a token attends to.
        scaling: factor of the scores; None for 1 / sqrt(d).
        sliding_window: number of tokens that a token attends to at most, itself included; None for all.
        softcap: bound c of attention scores z, as c * tanh(z / c); None for none.
        packed: description of the sequences.
        s_aux: attention sinks, which it does not have: `build_module` refuses such models.
        _: not read.

    Returns:
        (1, T / cp, heads, d_v), and None in place of attention weights.
    """
    assert packed is not None and attention_mask is None and s_aux is None and query.shape[0] == 1
    heads, tokens = query.shape[1], query.shape[2]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if packed.cp_group is not None:
        q, k, v = _to_heads(q, k, v, packed.cp_group)
    if not (q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16)):
        context = _run_by_run(q, k, v, packed, scaling, sliding_window, softcap)
    elif softcap is None:
        context = _with_ragged_kernel(q, k, v, packed, scaling, sliding_window)
    else:
        context = attend_with_block_mask(q, k, v, packed.block_mask(sliding_window), scaling, softcap)
    if packed.cp_group is not None:
        exchanged = all_to_all(context.unflatten(0, (packed.cp_group.size(), -1)), packed.cp_group)
        context = exchanged.transpose(0, 1).flatten(1, 2)
    return context.view(1, tokens, heads, -1), None


AttentionInterface.register(NAME, packed_attention)


def _to_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Exchanges tokens for heads: (T / cp, heads, d) -> (T, heads / cp, d), of each tensor."""
    size = group.size()
    # Key-value heads that cp does not divide are repeated until it does.
    parts = [part.repeat_interleave(size // gcd(part.shape[1], size), dim=1) for part in (query, key, value)]
    by_rank = [part.unflatten(1, (size, -1)) for part in parts]  # (T / cp, cp, n, d)
    sent = torch.cat([part.flatten(2) for part in by_rank], dim=2).transpose(0, 1)
    local = all_to_all(sent, group).flatten(0, 1)
    split = local.split([part.shape[2] * part.shape[3] for part in by_rank], dim=1)
    query, key, value = (part.unflatten(1, like.shape[2:]) for part, like in zip(split, by_rank, strict=True))
    return query, key, value


def _with_ragged_kernel(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedRows, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    width = value.shape[2]
    if not takes_value_width(query.shape[2], width):
        value = F.pad(value, (0, query.shape[2] - width))
    ends, longest = packed.cu_seqlens, packed.longest
    context = varlen_attn(
        query, key, value, ends, ends, longest, longest,
        scale=scaling, window_size=(-1 if window is None else window - 1, 0), enable_gqa=True,
    )  # fmt: skip
    assert isinstance(context, Tensor)
    return context[..., :width]


def _run_by_run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedRows,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attends with matrices, over neighbouring sequences of one length at once."""
    sizes = [count * length for count, length in packed.runs]
    outputs = []
    for (count, length), *heads in zip(packed.runs, *(x.split(sizes) for x in (query, key, value)), strict=True):
        q, k, v = (part.unflatten(0, (count, -1)).transpose(1, 2) for part in heads)  # (count, heads, length, d)
        mask = None
        if window is not None and window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        if softcap is None:
            context = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
        else:
            context = _with_softcap(q, k, v, mask, scaling, softcap)
        outputs.append(context.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _with_softcap(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float
) -> Tensor:
    length, repeat = query.shape[2], query.shape[1] // key.shape[1]
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh(query @ key.mT * (scale / softcap))
    return scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype) @ value
