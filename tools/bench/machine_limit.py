"""Limits of an update on this machine: only its matrix products, a copy of memory, attention to one whole row.

`Operations` records an update: every matrix product with its shapes, and the CPU seconds of every kernel. The products
then run again without the rest, as often and in the same order, into memory that is there: experts one after another,
as the update computes them. The share of these seconds in the update's is how near to the machine's limit it is.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verl_mg.training.packed_attention import Scores, Sequences, attend

ADAM_COPIES = 14
"""Bytes that AdamW reads for each weight, and about as many that it writes: as a copy of so many bytes moves."""
Call = tuple[str, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], tuple[int, ...]]
"""Name of a product, shapes and strides of its matrices, and ends of the groups of rows of a grouped one."""


class Operations(TorchDispatchMode):
    """Records the products and the CPU seconds of the kernels that run inside of this context manager."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Call] = []
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        begin = time.thread_time()
        result = function(*args, **(kwargs or {}))
        self.seconds[name] += time.thread_time() - begin
        self.calls[name] += 1
        if name in PRODUCTS:
            matrices = [value for value in args if isinstance(value, Tensor)][: PRODUCTS[name]]
            ends = (kwargs or {}).get("offs", args[2] if name == GROUPED and len(args) > 2 else None)
            shapes = tuple((tuple(matrix.shape), matrix.stride()) for matrix in matrices)
            self.products.append((name, shapes, () if ends is None else tuple(ends.tolist())))
        return result

    def lost(self, count: int) -> list[tuple[str, int, float]]:
        """Returns the kernels with the most seconds that are no products: names, calls, seconds."""
        others = [name for name in self.seconds if name not in PRODUCTS]
        longest = sorted(others, key=lambda name: -self.seconds[name])[:count]
        return [(name, self.calls[name], self.seconds[name]) for name in longest]


GROUPED = "_grouped_mm"
PRODUCTS = {"mm": 2, "addmm_": 3, GROUPED: 2}
"""Products of the weights, by their names in torch, and the number of their matrices."""


def products_alone(calls: Sequence[Call]) -> Callable[[], None]:
    """Returns a function that computes the products of an update, each in memory of its shape."""
    memory: dict[Any, Tensor] = {}

    def matrix(place: Any, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        if (place, shape, stride) not in memory:
            size = 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
            memory[place, shape, stride] = (torch.randn(size) / 100).as_strided(shape, stride)
        return memory[place, shape, stride]

    work: list[tuple[Callable[..., Tensor], tuple[Tensor, ...], Tensor]] = []
    for name, shapes, ends in calls:
        matrices = tuple(matrix(place, *shape) for place, shape in enumerate(shapes))
        if name == "addmm_":
            work.append((torch.addmm, matrices, matrices[0]))
            continue
        rows, width = matrices[0].shape[0], matrices[1].shape[-1]
        product = matrix("product", (rows, width), (width, 1))
        if name == "mm":
            work.append((torch.mm, matrices, product))
            continue
        starts = (0, *ends[:-1])
        for start, end, of_expert in zip(starts, ends, matrices[1], strict=True):
            work.append((torch.mm, (matrices[0][start:end], of_expert), product[start:end]))

    def compute() -> None:
        for function, matrices, product in work:
            function(*matrices, out=product)

    return compute


def copy_alone(weights: int) -> Callable[[], None]:
    """Returns a function that copies as many bytes as AdamW reads for the weights."""
    source = torch.ones(weights * ADAM_COPIES // 4)
    target = torch.ones_like(source)

    def compute() -> None:
        target.copy_(source)

    return compute


def attention(lengths: Tensor, heads: int, kv_heads: int, width: int) -> dict[str, Callable[[], None]]:
    """Returns functions that compute attention and its gradients: over packed rows, over one row of as many FLOPs."""
    return {
        "packed": _attention(lengths, heads, kv_heads, width),
        "one row": _attention(torch.tensor([math.isqrt(int(lengths.square().sum()))]), heads, kv_heads, width),
    }


def _attention(lengths: Tensor, heads: int, kv_heads: int, width: int) -> Callable[[], None]:
    sequences, total = Sequences(), int(lengths.sum())
    sequences.lengths = sequences.key_lengths = lengths
    query, key, value = (torch.randn(total, n, width, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    gradient = torch.randn(total, heads, width)

    def compute() -> None:
        torch.autograd.grad(attend(query, key, value, sequences, Scores()), (query, key, value), gradient)

    return compute
