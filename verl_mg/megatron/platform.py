"""Which device this process computes on, and which backend its process groups use."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch


def device() -> torch.device:
    """The GPU of this process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def backend() -> str:
    """`nccl` for tensors on GPUs with gloo beside it for those on the host, or gloo alone."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def optimizer_calls() -> AbstractContextManager[None]:
    """Held around the building and the steps of a megatron-core optimizer."""
    if torch.cuda.is_available():
        return nullcontext()
    from verl_mg.megatron.cpu import tensor_types_named_cuda

    return tensor_types_named_cuda()
