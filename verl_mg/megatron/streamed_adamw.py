"""AdamW one weight at a time, with its moments on the device, in host memory or on a disk, in float32 or bfloat16.

With moments in host memory the step is computed there (ZeRO-Offload, arXiv:2101.06840), while the next weight arrives
and the previous one returns:

    device -> host    weight and gradient i + 1      in turns with pinned buffers of two weights
    on the host       step of weight i
    host -> device    weight i - 1

megatron-core's `HybridDeviceOptimizer` overlaps the same copies, but keeps pinned copies of all weights and gradients,
16 bytes a weight on the host where this one keeps 8, has its state under other keys, with weights in it, creates an
optimizer for each weight, and looks for CUDA tensors, so that it cannot be tested on a CPU.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from verl_mg.errors import UserError
from verl_mg.megatron.core_version import optimizer_parts

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's moments, named as torch names them


class MomentMemory:
    """Memory in which moments are kept: of the weights' device, or of the host."""

    def __init__(self, on_host: bool) -> None:
        self._on_host = on_host

    def allocate(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns memory for one moment of a parameter."""
        return torch.empty_like(like, dtype=dtype, device="cpu" if self._on_host else None)

    def prefetch(self, values: Tensor) -> None:
        """Starts to bring values closer that are read soon; here they are as near as they can be."""


class DiskMemory(MomentMemory):
    """File without a name on a local disk, mapped into memory: the kernel reads and writes its pages."""

    # It disappears with the process. Pages that do not fit the host's free memory are on the disk only.

    def __init__(self, folder: Path, nbytes: int, key: str) -> None:
        super().__init__(on_host=True)
        size = nbytes + mmap.PAGESIZE
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                # Reserved now: a disk that is full later would end the process by a signal, in the middle of a step.
                os.posix_fallocate(file.fileno(), 0, size)
                # The mapping keeps the file, which has no name and needs no removal.
                self._map = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise UserError(
                f"{key}: {folder} has no space for {size / 2**30:.3g} GiB ({error.strerror}). Name a folder on a local "
                "disk with as much for each rank of the machine."
            ) from None
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._end = 0

    def allocate(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the next part of the file."""
        first, self._end = self._end, self._end + like.numel() * dtype.itemsize
        return self._bytes[first : self._end].view(dtype).view(like.shape)

    def prefetch(self, values: Tensor) -> None:
        """Makes the kernel read the pages."""
        first = values.data_ptr() - self._bytes.data_ptr()
        start = first - first % mmap.PAGESIZE
        if values.nbytes:
            self._map.madvise(mmap.MADV_WILLNEED, start, first + values.nbytes - start)


class StreamedAdamW(torch.optim.AdamW):
    """AdamW (arXiv:1711.05101). `state` has the weights as its keys, like that of any other optimizer."""

    def __init__(
        self, param_groups: list[dict[str, Any]], on_host: bool, dtype: torch.dtype, memory: MomentMemory
    ) -> None:
        super().__init__([torch.empty(0)])
        self.param_groups = param_groups  # megatron-core's shards are views, which torch's constructor refuses
        self._on_host, self._dtype, self._memory = on_host, dtype, memory
        self._allocated: dict[Tensor, dict[str, Tensor]] = {}
        self._buffers: list[_Buffer] = []

    def moments(self, weight: Tensor) -> tuple[str, ...]:
        """Returns the names of the moments of a weight."""
        return MOMENTS

    def new_state(self, weight: Tensor, steps: float = 0.0) -> dict[str, Tensor]:
        """Returns zero moments that count as having taken `steps` steps; of one weight always in the same memory."""
        # `state` is cleared when a checkpoint is restored, and a file has space for each moment once.
        if weight not in self._allocated:
            memory = self._memory
            self._allocated[weight] = {name: memory.allocate(weight, self._dtype) for name in self.moments(weight)}
        for values in self._allocated[weight].values():
            values.zero_()
        return {"step": torch.tensor(steps), **self._allocated[weight]}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates all weights that have a gradient."""
        work = [(weight, group) for group in self.param_groups for weight in group["params"]]
        work = [(weight, group) for weight, group in work if weight.grad is not None]
        for weight, _ in work:
            if weight not in self.state:
                self.state[weight] = self.new_state(weight)
        if self._on_host:
            self._step_on_host(work)
        else:
            for weight, group in work:
                self._update(weight, weight.grad, self.state[weight], group)

    def _step_on_host(self, work: list[tuple[Tensor, dict[str, Any]]]) -> None:
        if not work:
            return
        if not self._buffers:
            self._buffers = [_Buffer(max((weight for weight, _ in work), key=Tensor.numel)) for _ in range(2)]
        arriving, returning, current = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()
        # Gradients are complete on the current stream before the first copy.
        arriving.wait_stream(current)
        self._buffers[0].load(work[0][0], arriving)
        for number, (weight, group) in enumerate(work):
            if number + 1 < len(work):
                following = work[number + 1][0]
                for name in MOMENTS:
                    self._memory.prefetch(self.state[following][name])
                self._buffers[(number + 1) % 2].load(following, arriving)
            buffer = self._buffers[number % 2]
            host_weight, host_gradient = buffer.values(weight)
            self._update(host_weight, host_gradient, self.state[weight], group)
            buffer.store(weight, returning)
        # The next forward pass reads weights on the current stream.
        current.wait_stream(returning)

    def _update(self, weight: Tensor, gradient: Tensor | None, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        assert gradient is not None
        # Steps are float32 whatever the dtype of the moments.
        first, second = (state[name].float() for name in MOMENTS)  # themselves where they are float32
        adamw(
            [weight],
            [gradient],
            [first],
            [second],
            [],
            [state["step"]],
            # GPU: nothing else: moments are in host memory, and the step is the CPU's fused one.
            # GPU-TEST: tests/megatron/test_streamed_adamw.py::test_streamed_adamw_takes_the_steps_of_device_adam
            # GPU-RAN: not yet
            fused=weight.device.type == "cpu",
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if self._dtype is torch.bfloat16:
            for name, values in zip(MOMENTS, (first, second), strict=True):
                state[name].copy_(dithered_to_bfloat16(values, int(state["step"])))


class _Buffer:
    """Memory of one weight and its gradient on the host."""

    def __init__(self, largest: Tensor) -> None:
        # GPU: pinned memory, and copies on two separate streams.
        # GPU-TEST: tests/megatron/test_streamed_adamw.py::test_streamed_adamw_takes_the_steps_of_device_adam
        # GPU-RAN: not yet
        options: dict[str, Any] = {"dtype": torch.float32, "pin_memory": largest.is_cuda}
        self._weight, self._gradient = (torch.empty(largest.numel(), **options) for _ in range(2))
        self._loaded, self._stored = torch.cuda.Event(), torch.cuda.Event()

    def load(self, weight: Tensor, stream: torch.cuda.Stream) -> None:
        """Starts the copies of a weight and its gradient, after the last `store` from this memory."""
        stream.wait_event(self._stored)
        with torch.cuda.stream(stream):
            host_weight, host_gradient = self._parts(weight)
            host_weight.copy_(weight, non_blocking=True)
            if weight.grad is not None:
                host_gradient.copy_(weight.grad, non_blocking=True)
            self._loaded.record(stream)

    def values(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Waits for the copies and returns weight and gradient."""
        self._loaded.synchronize()
        return self._parts(weight)

    def store(self, weight: Tensor, stream: torch.cuda.Stream) -> None:
        """Starts the copy of the weight back to the device."""
        with torch.cuda.stream(stream):
            weight.copy_(self._parts(weight)[0], non_blocking=True)
            self._stored.record(stream)

    def _parts(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        count = weight.numel()
        return self._weight[:count].view(weight.shape), self._gradient[:count].view(weight.shape)


def dithered_to_bfloat16(values: Tensor, step: int) -> Tensor:
    """Rounds to one of the two neighbours in bfloat16, to the nearer one more often: right on average over steps."""
    # To the nearest, a moment that decays by less than 2**-8 of itself in a step would never decay. The choice
    # depends only on the value and the step, so it is the same under every layout and in a resumed run.
    bits = values.view(torch.int32)
    noise = (bits ^ step * 40503) * -1640531535  # two rounds of multiplication and shift, as in MurmurHash3
    noise = (noise ^ (noise >> 15 & 0x1FFFF)) * -2048144789
    noise = noise >> 16 & 0xFFFF
    # bfloat16 has the upper 16 bits of a float32; noise in the lower ones carries over in proportion to their value.
    return ((bits + noise) & -0x10000).view(torch.float32).bfloat16()


def stream_weights(
    optimizer: Any, on_host: bool, dtype: torch.dtype, folder: Path | None = None, name: str = "actor"
) -> None:
    """Replaces the torch optimizers inside a new megatron-core optimizer by `StreamedAdamW`."""
    for part in optimizer_parts(optimizer):
        groups = part.optimizer.param_groups
        memory = MomentMemory(on_host)
        if folder is not None:
            elements = sum(math.prod(weight.shape) for group in groups for weight in group["params"])
            memory = DiskMemory(folder, len(MOMENTS) * dtype.itemsize * elements, f"{name}.optimizer.nvme_folder")
        part.optimizer = StreamedAdamW(groups, on_host, dtype, memory)
