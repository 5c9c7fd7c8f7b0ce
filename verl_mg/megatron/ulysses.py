"""Context parallelism that exchanges heads for tokens around attention (DeepSpeed Ulysses, arXiv:2309.14509).

Outside attention a rank has a run of the token axis and all heads, inside the whole axis and a part of the heads.
"""

from __future__ import annotations

from math import gcd

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """query (T / cp, heads, d), key and value (T / cp, kv_heads, d) -> (T, heads / cp, d) and twice (T, n, d).

    cp divides the heads. Key-value heads that it does not divide are repeated until it does: n is
    lcm(kv_heads, cp) / cp, and still divides heads / cp.
    """
    size = group.size()
    if size == 1:
        return query, key, value
    repeat = size // gcd(key.shape[1], size)
    parts = [query, key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)]
    together = torch.cat([part.unflatten(1, (size, -1)) for part in parts], dim=2)
    exchanged: Tensor = all_to_all(group, together.transpose(0, 1))
    return exchanged.flatten(0, 1).split([part.shape[1] // size for part in parts], dim=1)


def to_tokens(context: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back: (T, heads / cp, d) -> (T / cp, heads, d)."""
    if group.size() == 1:
        return context
    exchanged: Tensor = all_to_all(group, context.unflatten(0, (group.size(), -1)))
    return exchanged.transpose(0, 1).flatten(1, 2)
