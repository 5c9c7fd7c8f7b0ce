"""Attention of `transformers`' modules over packed rows, with Ulysses context parallelism.

`transformers` lets a model's attention call a function by its registered name. This one attends within each packed
sequence, so that no mask of all pairs of tokens exists, and exchanges tokens for heads between context-parallel ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from verl_mg.fsdp.packed_rows import PackedRows
from verl_mg.training.head_exchange import heads_of_rank, to_heads, to_tokens
from verl_mg.training.packed_attention import Scores, attend

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
