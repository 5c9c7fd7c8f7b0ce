"""Tensors handed to another process of the machine by the handles of their memory; no value is copied into a message.

The handles are what `torch.multiprocessing` pickles: a name in shared memory on the CPU, a CUDA IPC handle on a GPU.
They go to the engine that this job has started, over its private socket; nothing is unpickled on this side.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor

from verl_mg.sharding.boxes import Shard


def staging(shards: Mapping[str, Shard], dtypes: Mapping[str, torch.dtype], device: torch.device) -> dict[str, Tensor]:
    """Tensors for the shards that can be handed over: in shared memory, if the device is the CPU. Padding is zero."""
    tensors = {name: torch.empty(shard.shape, dtype=dtypes[name], device=device) for name, shard in shards.items()}
    if device.type == "cpu":
        with _by_name():
            for tensor in tensors.values():
                tensor.share_memory_()
    for name, shard in shards.items():
        if shard.padding:
            tensors[name].zero_()
    return tensors


def payload(tensors: Mapping[str, Tensor]) -> str:
    """What SGLang's `update_weights_from_tensor` takes for one of its ranks, in base64; to be unpacked once.

    The tensors must live until it is.
    """
    if any(tensor.is_cuda for tensor in tensors.values()):
        # GPUs have other numbers in the engine's process: SGLang's reductions name them by what they are.
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
    buffer = io.BytesIO()
    with _by_name():
        ForkingPickler(buffer).dump(list(tensors.items()))
    return base64.b64encode(buffer.getvalue()).decode()


@contextmanager
def _by_name() -> Iterator[None]:
    """Inside, shared memory is a named file: an unrelated process can open it, which a file descriptor it cannot."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
