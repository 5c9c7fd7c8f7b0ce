"""Context parallelism by gathered keys and values, for ranks that have two chunks of each sequence.

A rank attends from its tokens to the keys and values of all ranks; see `token_order` for the chunks. With cp2 and 8
tokens the gathered ones are 0 1 6 7 2 3 4 5, and `order_of_gathered` is 0 1 4 5 6 7 2 3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from verl_mg.device import copy_to
from verl_mg.training.token_order import zigzag_tokens

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query (n, heads, L / cp, d), key (n, kv_heads, L, d), value (n, kv_heads, L, d_v), visible (L / cp, L) bool) ->
(n, heads, L / cp, d_v)."""


def gather_tokens(part: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers (T / cp, heads, d) to (T, heads, d), sequence by sequence; the backward pass sums gradients."""
    return gather_from_sequence_parallel_region(part.contiguous(), group=group)[order]


def order_of_gathered(lengths: Tensor, cp: int, device: torch.device) -> Tensor:
    """Returns the index of each token in the tokens of all ranks, rank after rank: (T,) int64.

    `lengths` (n,) int64 on the CPU are multiples of 2 * cp.
    """
    return copy_to(device, torch.cat([zigzag_tokens(lengths, cp, index) for index in range(cp)]).argsort())


def attend_to_gathered(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    window: int | None,
    cp: int,
    rank: int,
) -> Tensor:
    """Computes causal attention of this rank's tokens (T / cp, heads, d) to all keys (T, kv_heads, d).

    Queries and keys have their rotary embedding; `lengths` are multiples of 2 * cp.
    """
    # Sequences of equal length share a mask, and are one call.
    starts, outputs, computed = lengths.cumsum(0) - lengths, [], []
    for length in lengths.unique().tolist():
        begins = starts[lengths == length][:, None]
        local, whole = begins // cp + torch.arange(length // cp), begins + torch.arange(length)
        distance = zigzag_tokens(torch.tensor([length]), cp, rank)[:, None] - torch.arange(length)
        visible = (distance >= 0) & (distance < (window or length))
        q, k, v = (
            part[copy_to(query.device, tokens)].transpose(1, 2)
            for part, tokens in ((query, local), (key, whole), (value, whole))
        )
        outputs.append(attend(q, k, v, copy_to(query.device, visible)).transpose(1, 2).flatten(0, 1))
        computed.append(local.flatten())
    return torch.cat(outputs)[copy_to(query.device, torch.cat(computed).argsort())]
