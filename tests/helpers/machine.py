"""The GPUs of this machine, and how many ranks tests can have on it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from verl_mg import device

MAX_RANKS = 8
SHARING = (2, 30, 3)
"""First version of NCCL whose ranks can share a GPU."""


@dataclass(frozen=True)
class Machine:
    """gpus: their number; nccl: its version, () without GPUs."""

    gpus: int
    nccl: tuple[int, ...]

    @classmethod
    def this(cls) -> Machine:
        """Without a context of CUDA in this process, which asks NVML (see PYTORCH_NVML_BASED_CUDA_CHECK)."""
        if not torch.cuda.is_available():
            return cls(0, ())
        return cls(torch.cuda.device_count(), torch.cuda.nccl.version())

    @property
    def ranks(self) -> int:
        """On the CPU, and on GPUs that can be shared, as many as any test needs."""
        return MAX_RANKS if not self.gpus or self.nccl >= SHARING else min(self.gpus, MAX_RANKS)

    @property
    def shares_gpus(self) -> bool:
        return 0 < self.gpus < self.ranks

    @property
    def why_no_more(self) -> str:
        """The reason for which a test with more ranks is skipped."""
        version, first = (".".join(map(str, numbers)) for numbers in (self.nccl, SHARING))
        return f"this machine has {self.gpus} GPUs, which ranks share from NCCL {first} on; this is {version}"

    def set_variables(self) -> None:
        """For ranks, and jobs that tests start."""
        if self.shares_gpus:
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"


def free_memory() -> int:
    """Bytes of this rank's GPU that are free once nothing is kept for later; 0 on the CPU."""
    device.release_unused_memory()
    return device.free_memory() or 0
