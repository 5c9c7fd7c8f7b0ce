"""Passes tensors to another process of the machine as one memory handle; messages contain no values.

The handle is what `torch.multiprocessing` pickles: a name in shared memory on the CPU, a CUDA IPC handle on a GPU. It
is sent to the engine that this job has started, over a private socket; this side unpickles nothing.

torch keeps shared memory of a GPU until the other process has closed it, also when `Staging` is gone. Memory that a
process never opened, because it ended, stays allocated until this process ends.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import prod
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor

from verl_mg.device import without_expandable_segments
from verl_mg.sharding.boxes import Shard

ALIGNMENT = 256
"""Offsets of tensors in the memory are multiples of this number of bytes, as torch's allocator aligns them."""


class Staging:
    """Memory in which a rank assembles the shards of an engine's rank."""

    def __init__(
        self,
        shards: Mapping[str, Shard],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
        min_bytes: int = 0,
    ) -> None:
        """Allocates the memory: on the CPU in shared memory; padding is zero, other values are undefined.

        Args:
            shards: shards by name of the parameter.
            dtypes: dtype of each.
            device: device of the memory.
            min_bytes: smallest size; memory of one size is reused by the allocator.
        """
        self._places, size = _places(shards, dtypes)
        with without_expandable_segments() if device.type == "cuda" else nullcontext():
            self._memory = torch.empty(max(size, min_bytes), dtype=torch.uint8, device=device)
        if device.type == "cpu":
            with _by_name():
                self._memory.share_memory_()
        self.tensors = dict(named_views(self._places, self._memory))
        """Tensors of the shards, by name of the parameter."""
        for name, shard in shards.items():
            if shard.padding:
                self.tensors[name].zero_()

    def payload(self) -> str:
        """Returns the handle with the tensors' places, in base64, for `weight_loader`.

        It can be unpacked once, and the memory must exist until then.
        """
        if self._memory.is_cuda:
            # GPU indices differ in the engine's process: SGLang's reductions identify GPUs by UUID.
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            monkey_patch_torch_reductions()
        buffer = io.BytesIO()
        with _by_name():
            ForkingPickler(buffer).dump([(self._places, self._memory)])
        return base64.b64encode(buffer.getvalue()).decode()


def named_views(places: str, memory: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, view of the memory) of each tensor.

    Args:
        places: JSON list of (name, dtype, shape, offset in bytes).
        memory: (bytes,) uint8.
    """
    for name, dtype_name, shape, start in json.loads(places):
        dtype = getattr(torch, dtype_name)
        yield name, memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def staging_bytes(shards: Mapping[str, Shard], dtypes: Mapping[str, torch.dtype]) -> int:
    """Returns the size of the memory for shards.

    Args:
        shards: shards by name of the parameter.
        dtypes: dtype of each.
    """
    return _places(shards, dtypes)[1]


def _places(shards: Mapping[str, Shard], dtypes: Mapping[str, torch.dtype]) -> tuple[str, int]:
    """Returns the argument `places` of `named_views` for tensors one behind the other, and the bytes of all."""
    places, end = [], 0
    for name, shard in shards.items():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        places.append((name, str(dtypes[name]).removeprefix("torch."), shard.shape, start))
        end = start + prod(shard.shape) * dtypes[name].itemsize
    return json.dumps(places), end


@contextmanager
def _by_name() -> Iterator[None]:
    """Shares memory by file names inside this context: an unrelated process cannot open a file descriptor."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
