"""`sglang.Engine` with schedulers that know what the CPU lacks; imported in SGLang's processes alone."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.entrypoints.engine import Engine as SGLang
from sglang.srt.managers.scheduler import run_scheduler_process


def run_scheduler(*arguments: Any) -> None:
    """A scheduler process of SGLang."""
    if not torch.cuda.is_available():
        _leave_host_memory_unregistered()
    run_scheduler_process(*arguments)


def _leave_host_memory_unregistered() -> None:
    """The buffer of routed experts is registered with CUDA, whether there is one or not."""
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda *_, **__: None


class Engine(SGLang):
    """The same, its schedulers started by `run_scheduler`."""

    run_scheduler_process_func = staticmethod(run_scheduler)
