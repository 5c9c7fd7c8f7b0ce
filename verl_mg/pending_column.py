"""The column of a role call whose result is not computed yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class PendingColumn(Tensor):
    """Column that a role call in a `with job.concurrent_roles()` block returns: computed at the end of the block.

    Before that it can only be put into a `Batch`; every other use raises RuntimeError. Afterwards it behaves like an
    ordinary tensor.
    """

    call: str  # the role call that computes it, such as "actor.compute_logprobs"
    dimensions: tuple[int, ...]
    computed: bool

    @staticmethod
    def create(call: str, dimensions: Sequence[int], dtype: torch.dtype = torch.float32) -> PendingColumn:
        """Returns a column without values: of the role call that computes it, with its shape and dtype."""
        column = torch.empty(*dimensions, dtype=dtype).as_subclass(PendingColumn)
        column.call, column.dimensions, column.computed = call, tuple(dimensions), False
        return column

    def fill(self, values: Tensor) -> None:
        """Sets the values of the column, which must not be read before."""
        self.computed = True
        self.read(self.call).copy_(values)

    def read(self, what: str) -> Tensor:
        """Returns the values as an ordinary tensor; RuntimeError naming `what` before they are computed."""
        if not self.computed:
            raise RuntimeError(
                f"{what} is not computed yet: it is requested in a `with job.concurrent_roles()` block; "
                "read it after the block"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.computed:
            return repr(self.read(self.call))
        return f"PendingColumn({self.call}, {self.dimensions[0]} entries)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read(f"the result of {self.call}").__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Any use before the values would compute with uninitialized memory, so it raises instead.
        for column in _pending_columns((args, kwargs or {})):
            column.read(f"the result of {column.call}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _pending_columns(arguments: Any) -> Iterator[PendingColumn]:
    if isinstance(arguments, PendingColumn):
        yield arguments
    elif isinstance(arguments, list | tuple | dict):
        for part in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from _pending_columns(part)
