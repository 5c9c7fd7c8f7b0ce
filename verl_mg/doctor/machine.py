"""The machine of this rank: GPUs, limits of the process, shared memory."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

FILES_OF_A_RANK, FILES_PER_RANK = 512, 4
"""Open files that a rank needs by itself, and for each rank of the job, to which it is connected."""
SHARED_MEMORY = 2**30
"""Free bytes of /dev/shm that the ranks of a machine need: NCCL's buffers and the engines' queues."""
BUSY_SHARE = 0.05
"""Share of a GPU's memory above which other processes are reported."""


def describe_machine() -> dict[str, Any]:
    """Returns host name, GPUs, driver, limit of open files and free shared memory (bytes)."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "host": socket.gethostname(),
        "gpus": [f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "driver": _driver(),
        # The hard limit, up to which a job raises the soft one itself.
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "shared_memory": shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
    }


def machine_problems(machine: dict[str, Any], ranks: int) -> Iterator[str]:
    """Yields what the machine of `describe_machine` has too little of, for a job of so many ranks."""
    needed = FILES_OF_A_RANK + FILES_PER_RANK * ranks
    if machine["open_files"] != resource.RLIM_INFINITY and machine["open_files"] < needed:
        yield (
            f"open files: the hard limit {machine['open_files']} is below {needed}, for {ranks} ranks. "
            "Raise it: nofile in /etc/security/limits.conf, or --ulimit nofile of the container."
        )
    free = machine["shared_memory"]
    if free is not None and free < SHARED_MEMORY:
        yield (
            f"/dev/shm: {free / 2**20:.0f} MiB are free, 1024 are needed. "
            "Start the container with --shm-size=16g or --ipc=host, or mount an emptyDir of medium Memory there."
        )
    # RLIM_INFINITY is -1.
    if os.path.isdir("/sys/class/infiniband") and resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] >= 0:
        yield (
            "locked memory: RDMA needs it without a limit. "
            "Set memlock to unlimited, or --ulimit memlock=-1 of the container."
        )
    yield from _gpu_problems(machine)


def _gpu_problems(machine: dict[str, Any]) -> Iterator[str]:
    if machine["driver"] and not machine["gpus"]:
        yield (
            f"GPUs: there is driver {machine['driver']}, but torch {torch.__version__} for CUDA {torch.version.cuda} "
            "finds no GPU. Update the driver, start the container with --gpus all, or check CUDA_VISIBLE_DEVICES."
        )
    for index in range(len(machine["gpus"])):
        free, total = torch.cuda.mem_get_info(index)
        # Reported by one rank of the node, since all of them see all GPUs.
        if total - free > BUSY_SHARE * total and int(os.environ.get("LOCAL_RANK", "0")) == 0:
            yield (
                f"GPU {index}: {(total - free) / 2**30:.1f} GiB are in use. "
                "End the processes that nvidia-smi lists, or choose other GPUs by CUDA_VISIBLE_DEVICES."
            )


def _driver() -> str | None:
    """Returns the version of NVIDIA's driver, None without one."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    printed = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stdout.split()
    return printed[0] if printed else None
