"""One event loop for all gloo groups of a process.

torch creates a device for each gloo group, and gloo's event loop of a device wakes 100 times a second even when it is
idle. A Megatron job has tens of groups on each rank, and a GPU node has eight ranks; see tools/bench/bench_gloo.py.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo, Store, distributed_c10d

THREADS = 2  # threads of a group that run its collectives; torch's default for one device


class _SharedLoopGroup(ProcessGroupGloo):
    """Gloo group on the devices of this process. Options that torch 2.14 adds have their defaults."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, **_: bool) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = list(_devices(os.getpid()))
        options._threads = THREADS * len(options._devices)
        options._timeout = timeout
        super().__init__(store, rank, size, options)


def share_event_loop() -> None:
    """Makes torch create the gloo groups of this process on common devices."""
    # `init_process_group` and `new_group` create gloo groups by this name of their module.
    distributed_c10d.ProcessGroupGloo = _SharedLoopGroup  # type: ignore[misc,assignment]


@cache
def _devices(pid: int) -> tuple[Any, ...]:
    """Returns gloo's devices: one per interface of GLOO_SOCKET_IFNAME, else one on the default interface."""
    # They are kept for a process id, because a fork has no event loop.
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    create = ProcessGroupGloo.create_device
    return tuple(create(interface=name) for name in names) or (ProcessGroupGloo.create_default_device(),)
