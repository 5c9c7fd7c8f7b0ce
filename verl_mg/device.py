"""Device of this process, its environment, backend of its process groups, and deterministic kernels."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def current_device() -> torch.device:
    """Returns the GPU of this process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def copy_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Starts the copy of a tensor in host memory to a device; the host does not wait for the device's earlier work."""
    # A copy from memory that is not pinned ends after everything that was started on the device before it.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def backend() -> str:
    """Returns the backend of the group of all ranks: gloo for tensors in host memory, and NCCL for tensors on GPUs."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def group_backend() -> str:
    """Returns the backend of a group whose tensors are all on this rank's device."""
    # NCCL without gloo, which connects each pair of a group's ranks: 1,468 connections of a rank for one layout on
    # 1,024 ranks.
    return "nccl" if torch.cuda.is_available() else "gloo"


def set_default_variables() -> None:
    """Sets variables that CUDA and NCCL read when they start, except those that the user has set."""
    defaults = {
        # Kernels start in the order of their launches, which Megatron's overlap of communication relies on.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # Multicast buffers of NCCL would take GiB from the engines that share the GPU.
        "NCCL_NVLS_ENABLE": "0",
        # As SGLang sets it: in a process group of both, NCCL fails or hangs where the sides differ.
        "NCCL_CUMEM_ENABLE": "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def compute_deterministically() -> None:
    """Allows only bitwise repeatable kernels and collectives from here on; torch raises an error for others."""
    # https://docs.nvidia.com/cuda/cublas/#results-reproducibility; Megatron requires them too.
    for name, value in {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}.items():
        os.environ.setdefault(name, value)
    # Set in any case: 1 would allow Transformer Engine kernels that are not deterministic.
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


def compute_in_float32() -> None:
    """Lets products and convolutions of float32 keep its 24 bits on a GPU: cuDNN's default is TF32, which has 11."""
    # GPU: products and convolutions of float32 are IEEE's, not TF32; a CPU has no TF32.
    # GPU-TEST: tests/test_device.py::test_rank_computes_float32_with_all_of_its_bits
    # GPU-RAN: not yet
    # Containers may allow it for products too, by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE. torch has two sets of names for it,
    # and raises an error where one is read while the other has another value.
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    cudnn: Any = torch.backends.cudnn
    torch.backends.cuda.matmul.fp32_precision = cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "ieee"


def ranks_of_a_node(ranks: int) -> int:
    """Returns how many of the job's `ranks` share a machine, from variables of torchrun or mpirun; all without them."""
    for variable in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        if variable in os.environ:
            return min(int(os.environ[variable]), ranks)
    return ranks


def release_unused_memory() -> None:
    """Returns memory without tensors from torch's allocator to the device, where another process can use it."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # memory that was shared with a process which has closed it since
    torch.cuda.empty_cache()


def free_memory() -> int | None:
    """Returns the bytes of this process's GPU that no process uses; None on the CPU."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def total_memory() -> int | None:
    """Returns the bytes of this process's GPU; None on the CPU."""
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Context manager: torch allocates GPU memory whose handle any process of the machine can open.

    To open memory of an expandable segment a process needs the system call `pidfd_getfd`, which containers refuse.
    """
    before = torch._C._accelerator_getAllocatorSettings()
    inside = re.sub(r"expandable_segments\s*:\s*\w+", "expandable_segments:False", before)
    if inside == before:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(inside)
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
