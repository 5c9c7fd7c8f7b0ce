"""The CPU platform: what megatron-core asks of CUDA, answered by the CPU.

megatron-core names CUDA devices, streams and generators unconditionally. `install` answers those calls so
that its code runs as it is, over gloo. Every patch replaces something that would raise without a GPU, except
`tensor_types_named_cuda`, which is therefore held only around an optimizer's own calls. With CUDA present this
module is never imported.
"""

from __future__ import annotations

import functools
import logging
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


class _Stream:
    """A stream or event on which everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = wait = synchronize = record = _nothing

    def record_event(self, *_: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


def install() -> None:
    """Patch torch and megatron-core, once for the process."""
    _patch_torch()
    _patch_megatron()


def _patch_torch() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = cuda.current_stream = cuda.default_stream = lambda *_, **__: _Stream()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda._lazy_call = lambda call, **_: call()
    stay: Any = lambda self, *_, **__: self  # noqa: E731
    torch.Tensor.cuda = torch.nn.Module.cuda = stay  # type: ignore[method-assign]
    # `with torch.device(...)` knows the factories by identity: it must see the originals, which ours call.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return create


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    rng: Any = megatron_random
    rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # It warns when the CPU generator moves inside a CUDA region; here they are the same generator.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
    moe: Any = moe_utils
    if not hasattr(moe, "te_general_gemm"):
        moe.te_general_gemm = None
    dispatcher: Any = token_dispatcher
    dispatcher.maybe_move_tensor_to_cpu = _as_on_arrival
    regions: Any = mappings
    regions._gather_along_first_dim = _also_uneven(regions._gather_along_first_dim)


def _as_on_arrival(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Split sizes reach the CPU as numpy, which gloo takes; those that are there already megatron leaves tensors."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _also_uneven(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """gloo gathers equal parts alone; its all-to-all takes any."""

    @functools.wraps(gather)
    def gathered(part: torch.Tensor, group: Any, sizes: list[int] | None = None, *buffer: bool) -> torch.Tensor:
        if sizes is None or len(sizes) == 1:
            return gather(part, group, sizes, *buffer)
        whole = part.new_empty(sum(sizes), *part.shape[1:])
        dist.all_to_all_single(whole, torch.cat([part] * len(sizes)), sizes, [len(part)] * len(sizes), group=group)
        return whole

    return gathered


@contextmanager
def tensor_types_named_cuda() -> Iterator[None]:
    """Inside, `Tensor.type()` says `torch.cuda.FloatTensor`: megatron's optimizers sort parameters by that string."""
    original = torch.Tensor.type

    def named_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = named_cuda  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = original  # type: ignore[method-assign]
