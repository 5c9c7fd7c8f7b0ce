"""Stub of SGLang's compiled kernels for a CPU without AMX: every name can be imported, but not called."""

from collections.abc import Callable
from typing import Any

import torch


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is compiled code, and this is the CPU")

    return kernel


# The processors of Qwen's vision-language models import a model that looks these operators up; none is called here.
for operator in (
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
):
    torch.library.define(f"sgl_kernel::{operator}", "() -> ()")
