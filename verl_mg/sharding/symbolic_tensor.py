"""Tensors without elements, which know the place in a checkpoint that each element would come from.

A weight loader that runs on such tensors takes no memory, whatever the size of the model. Its slices, views,
concatenations and stacks are followed part by part; a part is a view of an empty tensor on the device "meta" that has
the shape of the checkpoint's tensor, so its offset and strides are the places of its elements. Other operations are
refused.

    torch.cat([gate, up]) of gate (2, 4), up (2, 4)    a symbolic tensor (4, 4) of two parts:
        Part(start=(0, 0), "gate", elements: offset 0, strides (4, 1))
        Part(start=(2, 0), "up", elements: offset 0, strides (4, 1))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_mg.errors import UserError
from verl_mg.sharding.boxes import Piece, Shard, box_shape, check_shard, contiguous_boxes

MAX_BOXES = 2**16  # of one parameter; more result from a loader that shuffles elements

Index = tuple[int, ...]
_aten = torch.ops.aten
_SAME_ELEMENTS = (_aten.clone.default, _aten.detach.default, _aten.alias.default, _aten._to_copy.default)
_PERMUTATIONS = (_aten.permute.default, _aten.transpose.int, _aten.t.default)
_RESHAPES = (_aten.view.default, _aten._unsafe_view.default)


class NotAMoveError(ValueError):
    """An operation changes elements, or is not followed."""


@dataclass(frozen=True)
class Part:
    """Box of a symbolic tensor with elements of one tensor of the checkpoint."""

    start: Index  # first corner of the box
    tensor: str  # name of the checkpoint's tensor
    whole: tuple[int, ...]  # shape of that tensor
    elements: Tensor  # view of a meta tensor of shape `whole`, with the shape of the box

    def moved(self, dim: int, distance: int) -> Part:
        """Returns the part `distance` elements further along a dimension, which is not negative."""
        start = (*self.start[:dim], self.start[dim] + distance, *self.start[dim + 1 :])
        return Part(start, self.tensor, self.whole, self.elements)


class SymbolicTensor(Tensor):
    """Tensor without elements, as a disjoint union of parts."""

    parts: tuple[Part, ...]

    @staticmethod
    def __new__(cls, shape: Sequence[int], parts: Sequence[Part]) -> SymbolicTensor:
        """Returns a float32 tensor on the CPU, as far as its properties show."""
        # A wrapper subclass has no storage, and is a Tensor wherever a loader requires one.
        made: SymbolicTensor = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=torch.float32)
        made.parts = tuple(parts)
        return made

    def __init__(self, shape: Sequence[int], parts: Sequence[Part]) -> None:
        """Does nothing: `__new__` has set the parts."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SymbolicTensor({tuple(self.shape)}, of {', '.join(part.tensor for part in self.parts)})"

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> SymbolicTensor:
        """Returns a whole tensor of the checkpoint."""
        return cls(shape, (Part((0,) * len(shape), name, tuple(shape), torch.empty(tuple(shape), device="meta")),))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SAME_ELEMENTS:
            return cls(args[0].shape, args[0].parts)
        if func is _aten.cat.default:
            return _cat(args[0], *args[1:], **kwargs)
        if func is _aten.stack.default:
            dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (args[0][0].dim() + 1)
            return _cat([_unsqueezed(tensor, dim) for tensor in args[0]], dim)
        if func in _RESHAPES:
            return _reshape(args[0], args[1])
        if func in _PERMUTATIONS:
            return _permuted(args[0], func, args[1:])
        # Views are followed by torch itself, on the meta tensor of the part.
        if not func.is_view or len(args[0].parts) != 1:
            raise NotAMoveError(f"the operation {func} of {args[0]!r} cannot be followed")
        (part,) = args[0].parts
        views = func(part.elements, *args[1:], **kwargs)
        return _of_view(part, views) if isinstance(views, Tensor) else [_of_view(part, view) for view in views]


def _of_view(part: Part, view: Tensor) -> SymbolicTensor:
    return SymbolicTensor(view.shape, (Part((0,) * view.dim(), part.tensor, part.whole, view),))


def _permuted(tensor: SymbolicTensor, func: Any, args: Sequence[Any]) -> SymbolicTensor:
    """Returns a tensor with its dimensions in another order, part by part."""
    # torch itself reads the arguments, on a tensor whose sizes are the numbers of its dimensions.
    order = func(torch.empty(tuple(range(tensor.dim())), device="meta"), *args).shape
    parts = [
        Part(tuple(p.start[axis] for axis in order), p.tensor, p.whole, p.elements.permute(order)) for p in tensor.parts
    ]
    return SymbolicTensor([tensor.shape[axis] for axis in order], parts)


def _unsqueezed(tensor: SymbolicTensor, dim: int) -> SymbolicTensor:
    parts = [
        Part((*p.start[:dim], 0, *p.start[dim:]), p.tensor, p.whole, p.elements.unsqueeze(dim)) for p in tensor.parts
    ]
    return SymbolicTensor((*tensor.shape[:dim], 1, *tensor.shape[dim:]), parts)


def _cat(tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    dim %= tensors[0].dim()
    shape, parts = list(tensors[0].shape), []
    shape[dim] = 0
    for tensor in tensors:
        parts += [part.moved(dim, shape[dim]) for part in tensor.parts]
        shape[dim] += tensor.shape[dim]
    return SymbolicTensor(shape, parts)


def _reshape(tensor: SymbolicTensor, sizes: Sequence[int]) -> SymbolicTensor:
    shape = tuple(torch.empty(tensor.shape, device="meta").view(sizes).shape)  # resolves a size of -1
    if shape == tuple(tensor.shape):
        return SymbolicTensor(shape, tensor.parts)
    if len(tensor.parts) != 1:
        raise NotAMoveError(f"{tensor!r} is reshaped to {shape}, which cannot be followed")
    (part,) = tensor.parts
    boxes = _reshaped(part.elements, shape)
    return SymbolicTensor(shape, [Part(start, part.tensor, part.whole, view) for start, view in boxes])


def _reshaped(elements: Tensor, shape: tuple[int, ...]) -> Iterator[tuple[Index, Tensor]]:
    """Yields the boxes of a reshaped view as (first corner, view): several where strides do not allow a single one."""
    try:
        view = elements.view(shape)
    except RuntimeError:
        pass
    else:
        yield (0,) * len(shape), view
        return
    size = elements[0].numel()
    # Strides that no single view has, such as of a slice of columns that is flattened: row by row.
    for number, inner in enumerate(elements):
        box, *more = contiguous_boxes(shape, number * size, (number + 1) * size)
        if more:
            raise NotAMoveError(f"a tensor of shape {tuple(elements.shape)} is reshaped to {shape}")
        for start, view in _reshaped(inner, box_shape(box)):
            yield tuple(first + offset for (first, _), offset in zip(box, start, strict=True)), view


def shard_of(parameter: str, tensor: SymbolicTensor) -> Shard:
    """Returns which boxes of which tensors a parameter consists of; UserError where it does not consist of boxes."""
    # All parts have their dimensions in one order, which a part without dimensions of length 1 shows the best.
    runs = [_along(parameter, part) for part in tensor.parts]
    shown = max(range(len(runs)), key=lambda number: sum(dim is not None for dim in runs[number].dims))
    order = _order(parameter, tensor.parts[shown], runs[shown].dims)
    pieces: list[Piece] = []
    for part, along in zip(tensor.parts, runs, strict=True):
        pieces += _pieces(parameter, part, along, order)
        if len(pieces) > MAX_BOXES:
            raise _not_boxes(parameter, part)
    shard = Shard(
        tuple(tensor.shape[axis] for axis in order),
        tuple(sorted(pieces, key=lambda piece: piece.target)),
        order=() if order == sorted(order) else tuple(order),
    )
    check_shard(parameter, shard)
    return shard


@dataclass(frozen=True)
class _Along:
    """Ranges of a tensor's dimensions that a view of it runs along."""

    origin: list[int]  # first element, by dimension of the tensor
    steps: list[int | None]  # distance of elements in the tensor; None: a single index
    lengths: list[int]
    dims: list[int | None]  # dimension of the tensor that each dimension of the view runs along; None: of length 1


def _along(parameter: str, part: Part) -> _Along:
    view, strides = part.elements, torch.empty(part.whole, device="meta").stride()
    origin = [int(at) for at in np.unravel_index(int(view.storage_offset()), part.whole)] if part.whole else []
    along = _Along(origin, [None] * len(part.whole), [1] * len(part.whole), [])
    for length, stride in zip(view.shape, view.stride(), strict=True):
        if length == 1:
            along.dims.append(None)
            continue
        # The dimension with the largest stride that divides the view's, which a slice with a step multiplies.
        dim = next((d for d, step in enumerate(strides) if stride and part.whole[d] > 1 and stride % step == 0), None)
        if dim is None or along.steps[dim] or origin[dim] + stride // strides[dim] * (length - 1) >= part.whole[dim]:
            raise _not_boxes(parameter, part)
        along.steps[dim], along.lengths[dim] = stride // strides[dim], length
        along.dims.append(dim)
    return along


def _order(parameter: str, part: Part, dims: Sequence[int | None]) -> list[int]:
    """Returns a part's dimensions in the order of its tensor's, which are the last ones of a stack."""
    leading = len(dims) - len(part.whole)
    if leading < 0:
        raise _not_boxes(parameter, part)
    at = {leading + dim: axis for axis, dim in enumerate(dims) if dim is not None}
    others = iter(axis for axis, dim in enumerate(dims) if dim is None)
    return [at[place] if place in at else next(others) for place in range(len(dims))]


def _pieces(parameter: str, part: Part, along: _Along, order: Sequence[int]) -> Iterator[Piece]:
    """Yields the boxes of a part: one, or one for each index of a dimension in which its elements are not adjacent."""
    leading = len(order) - len(part.whole)
    dims = [along.dims[axis] for axis in order]
    if leading < 0 or any(dim is not None and dim != at - leading for at, dim in enumerate(dims)):
        raise _not_boxes(parameter, part)
    begin, shape = ([of_dim[axis] for axis in order] for of_dim in (part.start, part.elements.shape))
    separate = [range(n) if (step or 1) > 1 else range(1) for step, n in zip(along.steps, along.lengths, strict=True)]
    for index in product(*separate):
        source: list[tuple[int, int]] = []
        target = [(first, first + size) for first, size in zip(begin, shape, strict=True)]
        ranges = zip(along.origin, along.steps, along.lengths, index, strict=True)
        for dim, (first, step, length, at) in enumerate(ranges):
            start = first + at * (step or 1)
            if (step or 1) == 1:
                source.append((start, start + length))
                continue
            source.append((start, start + 1))
            low = begin[leading + dim]
            target[leading + dim] = (low + at, low + at + 1)
        yield Piece(part.tensor, tuple(source), tuple(target))


def _not_boxes(parameter: str, part: Part) -> UserError:
    return UserError(
        f"{part.tensor}: transformers reshapes or shuffles it to fill the parameter {parameter}, and a weight table "
        "describes only boxes that are moved. Use another model."
    )
