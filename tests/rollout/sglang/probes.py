"""What tests look at inside SGLang's schedulers, where it runs as a loader of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

CHECK_DERIVED = f"{__name__}.check_derived"


def check_derived(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """What latent attention derives from `kv_b_proj` is that of the weights there now; else the scheduler ends."""
    for layer in model.model.layers:
        attention = layer.self_attn
        heads = attention.kv_b_proj.weight.unflatten(0, (attention.num_local_heads, -1))
        keys, values = heads.split([attention.qk_nope_head_dim, attention.v_head_dim], dim=1)
        assert torch.equal(attention.w_kc, keys) or torch.equal(attention.w_kc, keys.transpose(1, 2))
        assert torch.equal(attention.w_vc, values) or torch.equal(attention.w_vc, values.transpose(1, 2))
