"""Tensors whose elements encode their positions, so that the result of a weight loader shows what it did.

The elements of a whole checkpoint are numbered, one tensor after the other. A number is written in base `BASE`, with
one digit for each pass: in pass p every element of every tensor is the p-th digit of its number plus one, which is
exact in every floating-point type. The loader runs once for each pass, over parameters that were filled with
`UNWRITTEN` before; `decode` then derives from the passes which boxes of which tensors a parameter consists of.

A last pass contains a hash of the number. A loader that changes values (adds to them, scales or mixes them) cannot keep
digits and hash consistent, and is detected.

A checkpoint with a (2, 3) and b (2,) has the numbers 0 to 5 and 6 to 7, and two passes:

    a, pass 0   [[1, 2, 3], [4, 5, 6]]         pass 1, the hash   [[1, 111, 94], [77, 60, 43]]
    parameter   [[4, 5, 6], [0, 0, 0]]         after pass 1       [[77, 60, 43], [0, 0, 0]]
    decoded     row 1 of a in row 0: Piece("a", ((1, 2), (0, 3)), ((0, 1), (0, 3))); padding: ((1, 2), (0, 3))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl_mg.errors import UserError
from verl_mg.sharding.boxes import Box, Piece, Shard

BASE = 128  # codes up to 128 are exact in bfloat16, the coarsest type of parameters
UNWRITTEN = -1.0  # value of all elements of a parameter before it is loaded
MAX_BOXES = 2**16  # of one parameter; more result from a loader that shuffles elements
LINES = 16  # lines of each further dimension that are compared to find the order of dimensions

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class PositionCodes:
    """Position codes of all tensors of a checkpoint."""

    shapes: Mapping[str, tuple[int, ...]]  # {name: shape} of the checkpoint's tensors

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Tensors in the order in which their elements are numbered."""
        return tuple(self.shapes)

    @cached_property
    def offsets(self) -> Integers:
        """(tensors + 1,) number of the first element of each tensor, then the number of all elements."""
        return np.cumsum([0, *(math.prod(shape) for shape in self.shapes.values())], dtype=np.int64)

    @cached_property
    def passes(self) -> int:
        """Number of passes: one for each digit, and one for the hash."""
        digits, total = 1, int(self.offsets[-1])
        while BASE**digits < total:
            digits += 1
        return digits + 1

    def tensor(self, name: str, number: int) -> Tensor:
        """Returns a tensor in pass `number`: float32, every element from 1 to `BASE`."""
        start = int(self.offsets[self.names.index(name)])
        numbers = np.arange(start, start + math.prod(self.shapes[name])).reshape(self.shapes[name])
        if number == self.passes - 1:
            return torch.as_tensor(_hash(numbers)).float()
        return torch.as_tensor(numbers // BASE**number % BASE + 1).float()


def decode(name: str, codes: PositionCodes, passes: Sequence[Tensor]) -> Shard:
    """Derives which boxes of which tensors a parameter consists of, from its values after each pass.

    A box that was never written, or was written with zeros, is padding. Boxes are as large as possible, the last
    dimension first, in the order of dimensions that its tensors have. A tensor with fewer dimensions than the parameter
    is at one index of the leading dimensions. UserError where a value is in no tensor, or the parameter does not
    consist of boxes.
    """
    shape = tuple(passes[0].shape)
    numbers = _numbers(name, codes, [tensor.detach().cpu().float().numpy().reshape(shape or (1,)) for tensor in passes])
    order = _order(codes, numbers)
    numbers, shape = numbers.transpose(order), tuple(shape[at] for at in order) if shape else shape
    runs = _runs(name, codes, numbers)
    for dimension in reversed(range(numbers.ndim - 1)):
        runs = runs.merged(dimension)
    if len(runs.tensor) > MAX_BOXES:
        raise UserError(
            f"parameter {name} consists of {len(runs.tensor)} boxes, as of a shuffled tensor. "
            "Tables cannot describe it."
        )
    shard = _shard(codes, runs, shape)
    return shard if order == sorted(order) else replace(shard, order=tuple(order))


def is_written(passes: Sequence[Tensor]) -> bool:
    """Returns whether a loader wrote into a parameter, including the zeros of padding."""
    return any(bool((tensor != UNWRITTEN).any()) for tensor in passes)


def _hash(numbers: Integers) -> Integers:
    """Returns values from 1 to `BASE` that no linear change of a number predicts."""
    # Multiplicative hashing (Knuth), by a prime near 2^32 over the golden ratio: a bit depends on all lower ones.
    return (numbers * 0x9E3779B1 >> 15) % BASE + 1


def _numbers(name: str, codes: PositionCodes, passes: Sequence[NDArray[np.floating]]) -> Integers:
    """Returns the number of every element, -1 for padding."""
    *digits, check = (values.astype(np.float64) for values in passes)
    padding = np.logical_and.reduce([(values == UNWRITTEN) | (values == 0) for values in (*digits, check)])
    valid = np.ones(check.shape, np.bool_)
    numbers = np.zeros(check.shape, np.int64)
    for power, values in enumerate(digits):
        whole = np.where(np.isfinite(values), np.rint(values), 0).astype(np.int64)
        valid &= (whole == values) & (whole >= 1) & (whole <= BASE)
        numbers += (whole - 1) * BASE**power
    valid &= (numbers < codes.offsets[-1]) & (check == _hash(numbers))
    if not (valid | padding).all():
        where = tuple(int(i) for i in np.argwhere(~(valid | padding))[0])
        raise UserError(
            f"parameter {name}: the value at {where} is in no tensor of the checkpoint, so its loader changes values. "
            "Tables cannot describe that."
        )
    return np.where(padding, -1, numbers)


def _order(codes: PositionCodes, numbers: Integers) -> list[int]:
    """Returns the dimensions of a parameter in the order in which its tensors have them.

    Elements of a tensor are numbered with the last dimension the fastest: a step along the first dimension of a matrix
    that was loaded as it is adds the length of a row, and 1 where the matrix was transposed.
    """
    steps = {axis: step for axis in range(numbers.ndim) if (step := _step(codes, numbers, axis))}
    # A dimension of length 1, or that runs over tensors such as experts, stays where it is.
    order = list(range(numbers.ndim))
    for place, axis in zip(steps, sorted(steps, key=lambda axis: -steps[axis]), strict=True):
        order[place] = axis
    return order


def _step(codes: PositionCodes, numbers: Integers, axis: int) -> int:
    """Returns by how much numbers mostly grow along a dimension within a tensor; 0 where each is in another one."""
    # A sample of lines is enough to see the order; whatever it is, all elements are decoded.
    some = tuple(slice(None, None, 1 if at == axis else max(1, n // LINES)) for at, n in enumerate(numbers.shape))
    lines = np.moveaxis(numbers[some], axis, -1)
    before, after = lines[..., :-1], lines[..., 1:]
    of_one = (before >= 0) & (after >= 0)
    before, after = before[of_one], after[of_one]
    tensor_of = partial(np.searchsorted, codes.offsets, side="right")
    steps = np.abs(after - before)[tensor_of(before) == tensor_of(after)]
    values, counts = np.unique(steps, return_counts=True)
    return int(values[counts.argmax()]) if len(values) else 0


@dataclass(frozen=True)
class _Runs:
    """Boxes of a parameter with `dims` dimensions, as columns.

    The source has as many dimensions as the parameter: those that its tensor does not have are (0, 1).
    """

    tensor: Integers  # (boxes,) index of the tensor; -1 for padding, which is its own source
    start: Integers  # (boxes, dims) first corner in the parameter
    origin: Integers  # (boxes, dims) first corner in the tensor
    size: Integers  # (boxes, dims) lengths

    def merged(self, dimension: int) -> _Runs:
        """Joins boxes that are adjacent along a dimension, in the parameter and in the tensor."""
        moved = self.origin - self.start
        others = [d for d in range(self.start.shape[1]) if d != dimension]
        alike = [self.tensor, moved[:, dimension]]
        alike += [column[:, d] for column in (self.start, self.size, moved) for d in others]
        # Sorted by all that has to be equal, then by place: boxes that can be joined are next to each other.
        order = np.lexsort([self.start[:, dimension], *reversed(alike)])
        tensor, start, origin, size = (c[order] for c in (self.tensor, self.start, self.origin, self.size))
        joined = np.logical_and.reduce([c[order][1:] == c[order][:-1] for c in alike])
        joined &= start[1:, dimension] == start[:-1, dimension] + size[:-1, dimension]
        first = np.flatnonzero(np.append(True, ~joined))
        grown = size[first].copy()
        grown[:, dimension] = np.add.reduceat(size[:, dimension], first)
        return _Runs(tensor[first], start[first], origin[first], grown)


def _runs(name: str, codes: PositionCodes, numbers: Integers) -> _Runs:
    """Returns the longest runs along the last dimension that are in one row of one tensor, or padding."""
    flat, row = numbers.reshape(-1), numbers.shape[-1]
    if not flat.size:
        raise UserError(f"parameter {name} has no elements. Use a layout with fewer ranks for this model.")
    lasts = np.array([(shape or (1,))[-1] for shape in codes.shapes.values()], np.int64)
    written = flat >= 0
    tensor = np.where(written, np.searchsorted(codes.offsets, flat, side="right") - 1, -1)
    column = np.where(written, (flat - codes.offsets[tensor]) % lasts[tensor], -1)
    continues = np.where(written[1:], (flat[1:] == flat[:-1] + 1) & (column[1:] > 0), ~written[:-1])
    continues &= np.arange(1, flat.size) % row != 0  # a run ends with its row of the parameter
    first = np.flatnonzero(np.append(True, ~continues))
    start = np.stack(np.unravel_index(first, numbers.shape), axis=1)
    size = np.ones_like(start)
    size[:, -1] = np.diff(np.append(first, flat.size))
    return _Runs(tensor[first], start, _origins(name, codes, tensor[first], flat[first], start), size)


def _origins(name: str, codes: PositionCodes, tensor: Integers, number: Integers, start: Integers) -> Integers:
    """Returns the index of each element `number` in its tensor, with leading zeros; padding is at its own `start`."""
    origin = start.copy()
    for index in set(tensor.tolist()) - {-1}:
        source = codes.names[index]
        shape = codes.shapes[source] or (1,)
        if len(shape) > start.shape[1]:
            raise UserError(
                f"parameter {name} has fewer dimensions than its tensor {source}. Tables cannot describe it."
            )
        chosen = tensor == index
        indices = np.unravel_index(number[chosen] - codes.offsets[index], shape)
        origin[chosen] = 0
        origin[chosen, -len(shape) :] = np.stack(indices, axis=1)
    return origin


def _shard(codes: PositionCodes, runs: _Runs, shape: tuple[int, ...]) -> Shard:
    order = np.lexsort(runs.start.T[::-1])
    pieces, padding = [], []
    for index, start, origin, size in zip(
        *(column[order].tolist() for column in (runs.tensor, runs.start, runs.origin, runs.size)), strict=True
    ):
        target = _box(start, size, len(shape))
        if index < 0:
            padding.append(target)
        else:
            name = codes.names[index]
            pieces.append(Piece(name, _box(origin, size, len(codes.shapes[name])), target))
    return Shard(shape, tuple(pieces), tuple(padding))


def _box(start: list[int], size: list[int], dims: int) -> Box:
    ranges = tuple((s, s + n) for s, n in zip(start, size, strict=True))
    return ranges[len(ranges) - dims :]
