"""Exchange of tokens for heads between context-parallel ranks (DeepSpeed Ulysses, arXiv:2309.14509).

Outside attention a rank has neighbouring tokens and all heads, inside it has all tokens and a part of the heads:

    cp2, T = 8, heads a b c d        to_heads            to_tokens
    rank 0   tokens 0..3 of a b c d     ->  0..7 of a b     ->  0..3 of a b c d
    rank 1   tokens 4..7 of a b c d     ->  0..7 of c d     ->  4..7 of a b c d
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(values, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, values.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradients[0], ctx.group), None


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchanges tokens for heads: from all heads of a token shard to a head shard of all tokens.

    From query (T / cp, heads, d), key and value (T / cp, kv_heads, d) to query (T, heads / cp, d), key and value
    (T, lcm(kv_heads, cp) / cp, d): key-value heads that cp does not divide are repeated until it does. Widths d may
    differ, and so may the heads of keys and values.
    """
    if group is None or group.size() == 1:
        return query, key, value
    size = group.size()
    # One message carries all three tensors, concatenated along their elements.
    by_rank = [_repeated(part, 1, size).unflatten(1, (size, -1)) for part in (query, key, value)]  # (T / cp, cp, n, d)
    exchanged: Tensor = _AllToAll.apply(torch.cat([part.flatten(2) for part in by_rank], dim=2).transpose(0, 1), group)
    local = exchanged.flatten(0, 1).split([part.shape[2] * part.shape[3] for part in by_rank], dim=1)
    query, key, value = (part.unflatten(1, like.shape[2:]) for part, like in zip(local, by_rank, strict=True))
    return query, key, value


def to_tokens(context: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Exchanges heads for tokens, the inverse of `to_heads`: (T, heads / cp, d) -> (T / cp, heads, d)."""
    if group is None or group.size() == 1:
        return context
    exchanged: Tensor = _AllToAll.apply(context.unflatten(0, (group.size(), -1)), group)
    return exchanged.transpose(0, 1).flatten(1, 2)


def heads_of_rank(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns this rank's part of a parameter (heads, ...), by the distribution of heads in `to_heads`."""
    if group is None or group.size() == 1:
        return x
    return _repeated(x, 0, group.size()).chunk(group.size())[group.rank()]


def _repeated(x: Tensor, dim: int, size: int) -> Tensor:
    return x.repeat_interleave(size // gcd(x.shape[dim], size), dim=dim)
