"""The CPU platform: replacements of the CUDA calls of megatron-core, so that it runs unchanged over gloo.

megatron-core uses CUDA devices, streams and generators unconditionally. `install` replaces those calls by CPU ones.
Every patch replaces something that would raise without a GPU, except two: `tensor_types_named_cuda`, which is therefore
active only during an optimizer's calls, and the collectives of `core_version.use_cpu`, which saves copies. With CUDA
present this module is never imported.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._device import _device_constructors

from verl_mg.quick_imports import quick_imports

CPU = torch.device("cpu")
_FACTORIES = (
    *("tensor", "zeros", "ones", "empty", "full", "rand", "randn", "arange", "empty_strided"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
)
FOR_GPUS = (
    *("transformer_engine", "flash_mla", "flash_attn", "flash_attn_3", "flashinfer"),
    *("deep_ep", "cudnn", "tilelang", "fla"),
)
"""Optional packages of megatron-core for GPUs; where no driver is installed, importing some of them raises OSError."""


class _Stream:
    """Stream or event whose work is always complete."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _do_nothing(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = wait = synchronize = record = _do_nothing

    def record_event(self, *_: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


def install() -> None:
    """Patches torch and megatron-core, once per process."""
    # GPU: megatron-core may import `transformer_engine`, `flash_mla`, `flash_attn`, `flash_attn_3`, `flashinfer`,
    # `deep_ep`, `cudnn`, `tilelang` and `fla`.
    # GPU-TEST: tests/megatron/test_cpu_shim.py::test_package_for_gpus_that_finds_no_driver_is_not_imported
    # GPU-RAN: h200-1, h100-1
    # None makes an import raise ImportError: the package counts as not installed.
    for name in FOR_GPUS:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    # It would report on every rank that there is no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    _patch_torch()
    with quick_imports():
        from verl_mg.megatron import core_version

    core_version.use_cpu()


def _patch_torch() -> None:
    # GPU: streams, events and generators of the device: `cuda.current_device`, `cuda.Stream`, `cuda.Event`,
    # `cuda.synchronize`, `cuda.empty_cache`, `cuda.stream`, `cuda.current_stream`, `cuda.default_stream`,
    # `cuda.get_rng_state`, `cuda.set_rng_state`, `cuda.manual_seed`, `cuda._lazy_call`, `Tensor.cuda` and `Module.cuda`
    # are torch's.
    # GPU-TEST: tests/megatron/test_fake_cuda.py::test_train_family_on_cuda_has_values_of_transformers
    # GPU-RAN: h200-1, h100-1
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.Stream = cuda.Event = _Stream
    # One function each, because torch's compiler identifies them by object and refuses to register one twice.
    for name in ("synchronize", "empty_cache"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("stream", "current_stream", "default_stream"):
        setattr(cuda, name, lambda *_, **__: _Stream())
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda._lazy_call = lambda call, **_: call()
    return_self: Any = lambda self, *_, **__: self  # noqa: E731
    torch.Tensor.cuda = torch.nn.Module.cuda = return_self  # type: ignore[method-assign]
    # GPU: tensors are made on the device of the argument: `torch.tensor`, `torch.zeros`, `torch.ones`, `torch.empty`,
    # `torch.full`, `torch.rand`, `torch.randn`, `torch.arange`, `torch.empty_strided`, `torch.zeros_like`,
    # `torch.ones_like`, `torch.empty_like` and `torch.full_like` are torch's.
    # GPU-TEST: tests/megatron/test_cpu_shim.py::test_factories_replace_only_cuda_by_cpu
    # GPU-RAN: h200-1, h100-1
    # `with torch.device(...)` identifies the factories by object: it must register the originals, which ours call.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = CPU
        # Pinned memory is a GPU driver's: `megatron.core.resharding` requests it over gloo too.
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


@contextmanager
def tensor_types_named_cuda() -> Iterator[None]:
    """Context manager: `Tensor.type()` returns `torch.cuda.FloatTensor`, by which megatron-core sorts parameters."""
    # GPU: `Tensor.type` returns CUDA's names by itself.
    # GPU-TEST: tests/megatron/test_cpu_shim.py::test_tensor_types_named_cuda_applies_only_inside
    # GPU-RAN: h200-1, h100-1
    original = torch.Tensor.type

    def named_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = named_cuda  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]
