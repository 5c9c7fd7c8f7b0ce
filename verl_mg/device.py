"""Device of this process, its environment, backend of its process groups, and deterministic kernels."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT, KEPT_PART = 2**28, 2**26
"""Bytes of free memory that the host's allocator keeps at most, and bytes of the smallest part that it does not."""


def current_device() -> torch.device:
    """Returns the GPU of this process, or the CPU."""
    # GPU: the GPU with the rank's number on its node; in turn where ranks share GPUs.
    # GPU-TEST: tests/megatron/test_fake_cuda.py::test_train_family_on_cuda_has_values_of_transformers
    # GPU-RAN: h200-1, h100-1
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def copy_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Starts the copy of a tensor in host memory to a device; the host does not wait for the device's earlier work."""
    # GPU: a copy through pinned memory, for which the host does not wait.
    # GPU-TEST: tests/megatron/test_fake_cuda.py::test_train_on_cuda_needs_no_wait_for_a_micro_batch
    # GPU-RAN: h200-1, h100-1
    # A copy from memory that is not pinned ends after everything that was started on the device before it.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def backend() -> str:
    """Returns the backend of the group of all ranks: gloo for tensors in host memory, and NCCL for tensors on GPUs."""
    # GPU: NCCL for tensors on the device, gloo for tensors of the host.
    # GPU-TEST: tests/distributed/test_world.py::
    # test_join_with_a_gpu_enters_a_collective_first_and_waits_longer_than_a_stall
    # GPU-RAN: h200-1, h100-1
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def group_backend() -> str:
    """Returns the backend of a group whose tensors are all on this rank's device."""
    # GPU: only NCCL: objects and tensors of the host go through the group of all ranks.
    # GPU-TEST: none
    # GPU-RAN: h200-1
    # NCCL without gloo, which connects each pair of a group's ranks: 1,468 connections of a rank for one layout on
    # 1,024 ranks.
    return "nccl" if torch.cuda.is_available() else "gloo"


def keep_freed_memory() -> None:
    """Makes the allocator of the host keep what one layer frees for the next one."""
    # glibc would return it to the system and get it again, page by page: 3 to 6 % of an update on the CPU. Parts of
    # KEPT_PART and more are returned when they are freed, and so is what is free beyond KEPT.
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # musl and macOS have none
        mallopt(M_MMAP_THRESHOLD, KEPT_PART)
        mallopt(M_TRIM_THRESHOLD, KEPT)


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


def precision(dtype: torch.dtype) -> str:
    """Returns in words how products of a dtype are computed in this process."""
    words = [str(dtype).removeprefix("torch.")]
    # GPU: whether float32 is TF32.
    # GPU-TEST: tests/run/test_start_table.py::test_precision_on_a_gpu_says_what_float32_is_there
    # GPU-RAN: not yet
    if dtype is torch.float32 and torch.cuda.is_available():
        uses = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
        words.append("with TF32" if uses else "without TF32")
    return ", ".join(words + ["deterministic"] * torch.are_deterministic_algorithms_enabled())


def ranks_of_a_node(ranks: int) -> int:
    """Returns how many of the job's `ranks` share a machine, from variables of torchrun or mpirun; all without them."""
    for variable in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        if variable in os.environ:
            return min(int(os.environ[variable]), ranks)
    return ranks


def synchronize() -> None:
    """Waits until this process's device has done what was started on it; on the CPU nothing is left to do."""
    # GPU: a wait for all kernels and copies.
    # GPU-TEST: tests/megatron/test_fake_cuda.py::test_recorded_cuda_calls_keep_their_order
    # GPU-RAN: h200-1, h100-1
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_buffer(values: torch.Tensor) -> torch.Tensor:
    """Allocates host memory of the shape and dtype of a tensor, from and to which its device copies asynchronously."""
    # GPU: pinned memory.
    # GPU-TEST: tests/megatron/test_fake_cuda.py::test_fake_cuda_counts_operations_that_wait
    # GPU-RAN: h200-1, h100-1
    return torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)


def release_unused_memory() -> None:
    """Returns memory without tensors from torch's allocator to the device, where another process can use it."""
    # GPU: memory returns to the driver, also what other processes have opened and closed.
    # GPU-TEST: tests/weight_sync/test_memory_handover.py::
    # test_update_weights_wakes_engine_after_all_ranks_released_memory
    # GPU-RAN: h200-1, h100-1
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # memory that was shared with a process which has closed it since
    torch.cuda.empty_cache()


def free_memory() -> int | None:
    """Returns the bytes of this process's GPU that no process uses; None on the CPU."""
    # GPU: the driver's figure; on the CPU nothing is sized by it.
    # GPU-TEST: tests/weight_sync/test_transfer_plan.py::test_fitting_chunk_bytes_halves_until_two_fit_free_memory
    # GPU-RAN: h200-1, h100-1
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def total_memory() -> int | None:
    """Returns the bytes of this process's GPU; None on the CPU."""
    # GPU: the driver's figure; on the CPU nothing is sized by it.
    # GPU-TEST: none
    # GPU-RAN: h200-1, h100-1
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None


def is_blackwell() -> bool:
    """Returns whether this process's GPU is of the generation Blackwell or a newer one."""
    # GPU: from compute capability 10.0 on, engines get the kernels of experts and of FP8 that keep weights in place.
    # GPU-TEST: tests/engines/sglang/test_resolution.py
    # GPU-RAN: not yet
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (10, 0)


def allocator_settings() -> str:
    """Returns the settings of torch's allocator for GPUs, written as in its variable PYTORCH_ALLOC_CONF."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return torch._C._accelerator_getAllocatorSettings()
    settings: str = torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]  # torch below 2.13
    return settings


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Context manager: torch allocates GPU memory whose handle any process of the machine can open.

    To open memory of an expandable segment a process needs the system call `pidfd_getfd`, which containers refuse.
    """
    before = allocator_settings()
    inside = re.sub(r"expandable_segments\s*:\s*\w+", "expandable_segments:False", before)
    if inside == before:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(inside)
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
