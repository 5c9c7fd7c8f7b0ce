"""Context parallelism that exchanges heads for tokens around attention (DeepSpeed Ulysses, arXiv:2309.14509).

Outside attention a rank has a run of the token axis and all heads, inside the whole axis and a part of the heads.
"""

from __future__ import annotations

from math import gcd

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """query (T / cp, heads, d), key and value (T / cp, kv_heads, d) -> (T, heads / cp, d) and twice (T, n, d).

    cp divides the heads. Key-value heads that it does not divide are repeated until it does: n is
    lcm(kv_heads, cp) / cp, and still divides heads / cp. The three may differ in d, keys and values in kv_heads.
    """
    size = group.size()
    if size == 1:
        return query, key, value
    parts = [part.repeat_interleave(size // gcd(part.shape[1], size), dim=1) for part in (query, key, value)]
    by_rank = [part.unflatten(1, (size, -1)) for part in parts]  # (T / cp, cp, n, d)
    exchanged: Tensor = all_to_all(group, torch.cat([part.flatten(2) for part in by_rank], dim=2).transpose(0, 1))
    own = exchanged.flatten(0, 1).split([part.shape[2] * part.shape[3] for part in by_rank], dim=1)
    query, key, value = (part.unflatten(1, of.shape[2:]) for part, of in zip(own, by_rank, strict=True))
    return query, key, value


def to_tokens(context: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back: (T, heads / cp, d) -> (T / cp, heads, d)."""
    if group.size() == 1:
        return context
    exchanged: Tensor = all_to_all(group, context.unflatten(0, (group.size(), -1)))
    return exchanged.transpose(0, 1).flatten(1, 2)
