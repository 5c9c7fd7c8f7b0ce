"""Passes tensors to another process of the machine as memory handles; messages contain no values.

The handles are what `torch.multiprocessing` pickles: a name in shared memory on the CPU, a CUDA IPC handle on a GPU.
They are sent to the engine that this job has started, over a private socket; this side unpickles nothing.
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
    """Allocates tensors for shards: on the CPU in shared memory; padding is zero.

    Args:
        shards: shards by name of the parameter.
        dtypes: dtype of each.
        device: device of the tensors.
    """
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
    """Returns the argument of SGLang's `update_weights_from_tensor` for one of its ranks, in base64.

    It can be unpacked once, and the tensors must exist until then.
    """
    if any(tensor.is_cuda for tensor in tensors.values()):
        # GPU indices differ in the engine's process: SGLang's reductions identify GPUs by UUID.
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
    buffer = io.BytesIO()
    with _by_name():
        ForkingPickler(buffer).dump(list(tensors.items()))
    return base64.b64encode(buffer.getvalue()).decode()


@contextmanager
def _by_name() -> Iterator[None]:
    """Shares memory by file names inside this context: an unrelated process cannot open a file descriptor."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
