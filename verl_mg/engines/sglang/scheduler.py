"""`sglang.Engine` with schedulers adapted to the CPU; imported only in SGLang's processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.entrypoints.engine import Engine as SGLang
from sglang.srt.managers.scheduler import run_scheduler_process

from verl_mg.engines.sglang.unloaded_model import default_to_the_cpu


def run_scheduler(*arguments: Any) -> None:
    """Runs a scheduler process of SGLang."""
    if not torch.cuda.is_available():
        _skip_host_memory_registration()
        default_to_the_cpu()
        _pin_no_memory()
    run_scheduler_process(*arguments)


def _skip_host_memory_registration() -> None:
    # SGLang registers the buffer of routed experts with CUDA, also on a machine without.
    # srt/mem_cache/pool_host/common.py registers what is to be pinned, without a look at the device.
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda *_, **__: None


def _pin_no_memory() -> None:
    # SGLang pins the memory of adapters, also on a machine without a GPU, where torch raises.
    # srt/lora/lora.py and srt/lora/layers.py; only this process of SGLang is affected, and nothing in it uses a GPU.
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
    for name in ("tensor", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))


def _without_pinning(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(create)
    def create_unpinned(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return create(*arguments, **options)

    return create_unpinned


class Engine(SGLang):
    """SGLang's engine, whose schedulers run `run_scheduler`."""

    run_scheduler_process_func = staticmethod(run_scheduler)
