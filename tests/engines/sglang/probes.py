"""The host of an engine whose weight loader checks, before each further update, what SGLang derived from weights."""

from collections.abc import Sequence
from typing import Any

import torch

from verl_mg.engines import engine_host
from verl_mg.engines.sglang import host
from verl_mg.engines.sglang.weight_loader import load_chunk

LOADER = "tests.engines.sglang.probes.check_and_load"


def check_and_load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Copies the tensors, after `check_derived` from the second time on; a failure ends the scheduler."""
    if getattr(model, "updated_before", False):
        check_derived(model)
    load_chunk(model, named_tensors)
    model.updated_before = True


def check_derived(model: Any) -> None:
    """What latent attention derives from `kv_b_proj` is that of the weights there now."""
    for layer in model.model.layers:
        attention = layer.self_attn
        heads = attention.kv_b_proj.weight.unflatten(0, (attention.num_local_heads, -1))
        keys, values = heads.split([attention.qk_nope_head_dim, attention.v_head_dim], dim=1)
        assert torch.equal(attention.w_kc, keys) or torch.equal(attention.w_kc, keys.transpose(1, 2))
        assert torch.equal(attention.w_vc, values) or torch.equal(attention.w_vc, values.transpose(1, 2))


if __name__ == "__main__":
    host.LOADER = LOADER
    engine_host.main(host.create, "sglang.srt.entrypoints.engine")
