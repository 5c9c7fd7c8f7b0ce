"""Stub of SGLang's compiled kernels for a CPU without AMX: every name can be imported, but not called."""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is compiled code, and this is the CPU")

    return kernel
