"""Lets SGLang's prefill servers run on a CPU: they pin memory and record an event of CUDA for each transfer.

Python imports this module at the start of every process that has the folder in PYTHONPATH.
"""

from collections.abc import Callable
from typing import Any

import torch


def _unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values, pin_memory=False, **keywords: function(*values, **keywords)


class _PastEvent:
    """Event of a stream that never lags behind."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Records nothing, since nothing is outstanding."""

    def synchronize(self) -> None:
        """Returns at once, since nothing is outstanding."""

    def query(self) -> bool:
        """Returns that everything is complete."""
        return True


for name in ("empty", "zeros", "tensor", "full"):
    setattr(torch, name, _unpinned(getattr(torch, name)))
torch.cuda.Event = _PastEvent
torch.cuda.current_stream = _PastEvent
