"""Which device this process computes on, and which backend its process groups use."""

from __future__ import annotations

import os

import torch


def current_device() -> torch.device:
    """The GPU of this process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def backend() -> str:
    """`nccl` for tensors on GPUs with gloo beside it for those on the host, or gloo alone."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def compute_deterministically() -> None:
    """From here on kernels and collectives that repeat to the bit alone; before any of them has run.

    torch raises where an operation has none.
    """
    # https://docs.nvidia.com/cuda/cublas/#results-reproducibility; and what Megatron's deterministic mode asks for.
    for name, value in {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}.items():
        os.environ.setdefault(name, value)
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def ranks_of_a_node(ranks: int) -> int:
    """How many of the job's `ranks` stand on one machine, as torchrun or mpirun tell it; all, if neither does."""
    for variable in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        if variable in os.environ:
            return min(int(os.environ[variable]), ranks)
    return ranks
