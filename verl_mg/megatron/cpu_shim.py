"""The CPU platform: replacements of the CUDA calls of megatron-core, so that it runs unchanged over gloo.

megatron-core uses CUDA devices, streams and generators unconditionally. `install` replaces those calls by CPU ones.
Every patch replaces something that would raise without a GPU, except two: `tensor_types_named_cuda`, which is therefore
active only during an optimizer's calls, and `_unless_alone`, which saves copies. With CUDA present this module is never
imported.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

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
    # None makes an import raise ImportError: the package counts as not installed.
    for name in FOR_GPUS:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    # It would report on every rank that there is no GPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    _patch_torch()
    with _quick_import():
        _patch_megatron()


@contextmanager
def _quick_import() -> Iterator[None]:
    """Context manager: megatron-core is imported without what takes seconds and is not used on the CPU."""
    # Its fused functions are left as they are written, because to decorate them `torch.compile` imports a compiler;
    # and Weights & Biases, which its timers import where it is installed, counts as not installed.
    compiled, tracker = torch.compile, sys.modules.get("wandb")
    torch.compile = lambda function: function  # type: ignore[assignment]
    sys.modules["wandb"] = tracker  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiled
        if tracker is None:
            del sys.modules["wandb"]


def _patch_torch() -> None:
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


def _patch_megatron() -> None:
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    rng: Any = megatron_random
    rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    rng._get_share_storage = lambda: _copy_storage  # the original compiles a function of C++
    # It warns when the CPU generator advances inside a CUDA region; here they are the same generator.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
    dispatcher: Any = token_dispatcher
    dispatcher.maybe_move_tensor_to_cpu = _maybe_as_numpy
    buffers: Any = param_and_grad_buffer
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(buffers, name, _unless_alone(getattr(buffers, name)))
    regions: Any = mappings
    regions._gather_along_first_dim = _with_uneven_sizes(regions._gather_along_first_dim)


def _unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves out collectives of one rank whose result is in its place already: gloo would copy it there and back."""

    @functools.wraps(collective)
    def called(output: torch.Tensor, values: torch.Tensor, *, group: Any, async_op: bool, **options: Any) -> Any:
        if group.size() == 1 and output.data_ptr() == values.data_ptr() and not async_op:
            return None
        return collective(output, values, group=group, async_op=async_op, **options)

    return called


def _copy_storage(target: torch.Tensor, source: torch.Tensor) -> None:
    """Allocates the storage of a tensor again, with the values of another tensor."""
    storage, values = target.untyped_storage(), source.untyped_storage()
    storage.resize_(values.nbytes())
    storage.copy_(values)


def _maybe_as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Converts split sizes to numpy, as gloo needs: megatron-core converts only tensors that it moves to the CPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _with_uneven_sizes(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Gathers parts of different sizes by all-to-all, because gloo's all-gather needs equal sizes."""

    @functools.wraps(gather)
    def gathered(part: torch.Tensor, group: Any, sizes: list[int] | None = None, *buffer: bool) -> torch.Tensor:
        if sizes is None or len(sizes) == 1:
            return gather(part, group, sizes, *buffer)
        result = part.new_empty(sum(sizes), *part.shape[1:])
        dist.all_to_all_single(result, torch.cat([part] * len(sizes)), sizes, [len(part)] * len(sizes), group=group)
        return result

    return gathered


@contextmanager
def tensor_types_named_cuda() -> Iterator[None]:
    """Context manager: `Tensor.type()` returns `torch.cuda.FloatTensor`, by which megatron-core sorts parameters."""
    original = torch.Tensor.type

    def named_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = named_cuda  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]
