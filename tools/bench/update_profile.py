"""Rows of a report about one update of a role: its kernels, waits of the host, and the speed of its offload."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from verl_mg.planner.inputs import GIB
from verl_mg.roles.models import Actor
from verl_mg.training.offload import CpuOffload

TOP_KERNELS = 10
Row = tuple[str, str]
"""Name and value."""


def update_rows(update: Callable[[], Any]) -> Iterator[Row]:
    """Yields the kernels with the most time (on the CPU: operations), and how often the host waits for the GPU."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recorded:
        update()
        if on_gpu:
            torch.cuda.synchronize()
    column = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    spent = {entry.key: getattr(entry, column) for entry in recorded.key_averages() if not entry.is_user_annotation}
    total = sum(spent.values())
    for name in sorted(spent, key=lambda name: -spent[name])[:TOP_KERNELS]:
        yield f"in an update: {name[:60].replace('|', '/')}", f"{spent[name] / total:.1%} of {total / 1e6:.3f} s"
    if on_gpu:
        yield "waits of the host in an update", f"{host_waits(update)}"


def host_waits(work: Callable[[], Any]) -> int:
    """Returns how often the host waits for the GPU, as CUDA reports it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def offload_rows(actor: Actor, repeats: int) -> Iterator[Row]:
    """Yields the speed at which a role leaves the device and returns; gradients are not copied."""
    offload = CpuOffload(actor.runner, actor.trainer)
    copied = [*actor.runner.weight_storages(), *actor.trainer.state_storages()]
    size = sum(storage.nbytes() for storage in copied)
    seconds: dict[str, list[float]] = {"to the host": [], "to the device": []}
    for _ in range(repeats + 1):
        for direction, move in (("to the host", offload.to_host), ("to the device", offload.to_device)):
            started = time.perf_counter()
            move()
            seconds[direction].append(time.perf_counter() - started)
    for direction, taken in seconds.items():
        median = statistics.median(taken[1:])
        yield f"offload {direction}", f"{size / median / 1e9:.4g} GB/s ({size / GIB:.2f} GiB, {median:.3f} s)"
