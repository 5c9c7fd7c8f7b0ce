"""The machine of this rank: installed packages and whether they fit together, GPUs, limits, shared memory."""

from __future__ import annotations

import importlib
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

PACKAGES = ("megatron-core", "transformer-engine", "apex", "sglang", "transformers")
PINNED_BY_SGLANG = ("torch", "transformers", "tokenizers")
"""Packages of which SGLang and training share one version, because they share an environment."""
INSTALL = "Install launch/requirements-gpu.txt, in which all versions fit together"


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python, torch, CUDA, NCCL and the packages, "none" for what is not there."""
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, nccl)) or installed("nvidia-nccl-cu13") or "none",
        **{package: installed(package) or "none" for package in PACKAGES},
    }


def installed(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def version_problems(on_gpus: bool) -> Iterator[str]:
    """Yields what does not fit together; GPUs need the packages of the extras gpu and sglang."""
    extras = ("", "gpu", "sglang") if on_gpus else ("",)
    yield from unmet(_requirements("verl-mg"), extras)
    shared = [each for each in _requirements("sglang") if each.name in PINNED_BY_SGLANG]
    yield from (f"SGLang needs {problem}" for problem in unmet(shared, ("",)))
    if on_gpus:
        yield from _import_problems()


def unmet(requirements: Iterable[Requirement], extras: Iterable[str]) -> Iterator[str]:
    """Yields a line for each requirement that the installed packages do not meet; "" is the extra of the others."""
    for wanted in requirements:
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        current = installed(wanted.name)
        if current is None or not wanted.specifier.contains(current, prereleases=True):
            state = f"{current} is installed" if current else "it is not installed"
            yield f"{wanted.name}{wanted.specifier}: {state}. {INSTALL}."


def _requirements(package: str) -> list[Requirement]:
    return [Requirement(line) for line in requires(package) or ()] if installed(package) else []


def _import_problems() -> Iterator[str]:
    # Metadata do not say for which CUDA a library was built; its import does.
    for module in ("transformer_engine.pytorch", "sglang"):
        try:
            importlib.import_module(module)
        except Exception as error:  # a library of another CUDA raises many kinds
            reason = re.sub(r"\s+", " ", str(error))
            yield f"{module}: cannot be imported ({type(error).__name__}: {reason}). {INSTALL}."


FILES_OF_A_RANK, FILES_PER_RANK = 512, 4
"""Open files that a rank needs by itself, and for each rank of the job, to which it is connected."""
SHARED_MEMORY = 2**30
"""Free bytes of /dev/shm that the ranks of a machine need: NCCL's buffers and the engines' queues."""
BUSY_SHARE = 0.05  # share of a GPU's memory above which other processes are reported


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
