"""Boxes of tensor elements, and parameter shards as unions of such boxes.

box      half-open ranges, one for each dimension; identifies elements of a tensor
piece    a box of a Hugging Face tensor, and the box of the same elements in a parameter shard
shard    a parameter on one rank: its shape, its pieces, and boxes that are padding

    tensor e (10, 4), a vocabulary of 10 tokens that is padded to 16 rows, on rank 1 of 2:

    Shard((8, 4),
          pieces=(Piece("e", source=((8, 10), (0, 4)), target=((0, 2), (0, 4))),)    rows 8 and 9 of e
          padding=(((2, 8), (0, 4)),))                                               6 rows without a token

A shard may describe its parameter with the dimensions in another order, that of its tensors: a loader that transposes
t (3, 5) into a parameter (5, 3) gives Shard((3, 5), (Piece("t", whole, whole),), order=(1, 0)), one piece instead of
one for each element. Whoever reads or writes the parameter has the view `shard.described(parameter)`; plans, schedules
and counts of bytes see boxes only.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from verl_mg.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""Half-open ranges, one for each dimension: ((0, 4), (8, 16)) is rows 0 to 3 of columns 8 to 15."""
Order = tuple[int, ...]
"""Dimensions of a parameter in the order in which its shard has them; () where that is the parameter's own order."""
FEW_BOXES = 16  # boxes up to which looking at each is faster than an index of them
BlockSize = tuple[int, int]  # rows and columns of the blocks of a matrix, of which each has a scale


@dataclass(frozen=True)
class Piece:
    """A box of a Hugging Face tensor, and the box of a parameter shard that contains the same elements."""

    tensor: str  # name of the tensor in the Hugging Face checkpoint
    source: Box  # box in the tensor
    # Box in the shard. A shard may stack tensors: its additional leading dimensions have length 1 here.
    target: Box

    def source_of(self, box: Box) -> Box:
        """Returns the box in the tensor of a box in `target`, which has a dimension more in a stack of experts."""
        stacked = len(self.target) - len(self.source)
        return translate_box(box[stacked:], self.target[stacked:], self.source)


@dataclass(frozen=True)
class Shard:
    """A parameter on one rank as a disjoint union of pieces and padding."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # pieces of Hugging Face tensors, each element of the shard in at most one of them
    padding: tuple[Box, ...] = ()  # boxes of the shard that no tensor fills, such as the rows that pad a vocabulary
    order: Order = ()  # the parameter's dimensions in the order of `shape` and of all boxes

    def described(self, parameter: Tensor) -> Tensor:
        """Returns the parameter as a view with the dimensions of the shard."""
        return described(parameter, self.order)

    def as_parameter(self, values: Tensor) -> Tensor:
        """Returns values with the dimensions of the shard as a view with the dimensions of the parameter."""
        return described(values, sorted(range(len(self.order)), key=self.order.__getitem__))

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Shape of the parameter itself."""
        # Dimension d of the shard is dimension order[d] of the parameter.
        return tuple(size for _, size in sorted(zip(self.order, self.shape, strict=True))) if self.order else self.shape


def described(parameter: Tensor, order: Sequence[int]) -> Tensor:
    """Returns a parameter as a view with its dimensions in this order; () is its own."""
    return parameter.permute(*order) if order else parameter


def full_box(shape: tuple[int, ...]) -> Box:
    """Returns the box of a whole tensor."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Returns the length of each range of a box."""
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    """Returns the number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def scale_grid(shape: tuple[int, ...], block: BlockSize) -> tuple[int, ...]:
    """Returns the number of blocks in each dimension of a matrix; the last ones may be incomplete."""
    return tuple(-(-size // length) for size, length in zip(shape, block, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """Returns the box as an index of a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Returns the elements that are in both boxes of one tensor."""
    if a == b:
        return a
    # The innermost loop of plans: comparisons are faster than calls of min and max.
    common = []
    for (s, u), (t, v) in zip(a, b, strict=True):
        start, stop = s if s > t else t, u if u < v else v
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def translate_box(inner: Box, origin: Box, destination: Box) -> Box:
    """Moves a box from one frame of reference to another, for example from a tensor to a shard of it.

    Rows 2:3 of a box of rows 0:6 that is at rows 8:14 of a parameter are its rows 10:11.
    """
    stacked = len(destination) - len(origin)
    if inner == origin:  # most calls of a plan: boxes that move whole
        return destination
    return destination[:stacked] + tuple(
        (start - o + d, stop - o + d)
        for (start, stop), (o, _), (d, _) in zip(inner, origin, destination[stacked:], strict=True)
    )


def cut(box: Box, parts: int) -> Iterator[tuple[int, Box]]:
    """Cuts a box into parts of nearly equal size, along its first dimensions.

    Four rows in three parts: rows 0:1, 1:2 and 2:4.
    """
    axis = next((i for i, (start, stop) in enumerate(box) if stop - start > 1), None)
    if parts == 1 or axis is None:
        yield 0, box
        return
    start, stop = box[axis]
    length = stop - start
    # Along the first dimension of more than one element: a slab of rows stays contiguous in memory.
    for number in range(min(length, parts)):
        first, last = (start + edge * length // min(length, parts) for edge in (number, number + 1))
        slab = (*box[:axis], (first, last), *box[axis + 1 :])
        if parts <= length:
            yield number, slab
            continue
        before = number * parts // length
        for inner, part in cut(slab, (number + 1) * parts // length - before):
            yield before + inner, part


def largest_part(box: Box, parts: int) -> int:
    """Returns the elements of the largest of the parts of `cut`."""
    axis = next((i for i, (start, stop) in enumerate(box) if stop - start > 1), None)
    if parts == 1 or axis is None:
        return numel(box)
    start, stop = box[axis]
    rows = -(-(stop - start) // parts)
    slab = (*box[:axis], (0, rows), *box[axis + 1 :])
    return largest_part(slab, max(1, parts // (stop - start)))


def contiguous_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yields a range of a flattened tensor as boxes, each contiguous in memory, in rising order.

    Elements 2:9 of a tensor (3, 4) are the end of row 0, row 1 and the start of row 2.
    """
    if not shape:  # a scalar, whose box has no dimension
        yield from [()] * (stop - start)
        return
    inner = math.prod(shape[1:])
    while start < stop:
        row, within = divmod(start, inner)
        rows = (stop - start) // inner
        if within == 0 and rows:
            yield ((row, row + rows), *full_box(shape[1:]))
            start += rows * inner
            continue
        end = min(stop - row * inner, inner)
        yield from (((row, row + 1), *box) for box in contiguous_boxes(shape[1:], within, end))
        start = row * inner + end


def uncovered(box: Box, overlaps: Sequence[Box]) -> list[Box]:
    """Returns the parts of a box that are in none of the boxes within it."""
    if sum(map(numel, overlaps)) == numel(box):  # disjoint, so their sizes add up
        return []
    remaining = [box]
    for cover in overlaps:
        remaining = [part for whole in remaining for part in subtract(whole, cover)]
    return remaining


class BoxIndex:
    """Boxes of one tensor, found by the place of another box.

    Boxes with the same range of the first dimension are together, in an index of the other dimensions where they are
    many. Boxes of a table are ranges of rows, or of rows and columns, found in the logarithm of their number.
    """

    def __init__(self, boxes: Sequence[Box], numbers: Sequence[int] | None = None, axis: int = 0) -> None:
        numbers = range(len(boxes)) if numbers is None else numbers
        self._axis, dims = axis, len(boxes[0]) if boxes else 0
        self._scalars = numbers if not dims else ()  # boxes without a dimension, which are all the same
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number in numbers if dims else ():
            groups[boxes[number][axis]].append(number)
        self._ranges = sorted(groups)
        # Stops do not rise with starts where ranges are nested: the search goes back until all stops are too low.
        self._highest = list(accumulate((stop for _, stop in self._ranges), max))
        self._inner: list[Sequence[int] | BoxIndex] = [
            group if len(group := groups[at]) <= FEW_BOXES or axis + 1 == dims else BoxIndex(boxes, group, axis + 1)
            for at in self._ranges
        ]

    def candidates(self, box: Box) -> Iterator[int]:
        """Yields the numbers of boxes that may have elements in common with this one, all that have some among them."""
        if self._scalars:
            yield from self._scalars
            return
        start, stop = box[self._axis]
        number = bisect_left(self._ranges, (stop, -1)) - 1
        while number >= 0 and self._highest[number] > start:
            if self._ranges[number][1] > start:
                inner = self._inner[number]
                yield from inner.candidates(box) if isinstance(inner, BoxIndex) else inner
            number -= 1


def subtract(box: Box, hole: Box) -> list[Box]:
    """Returns the parts of a box that are outside another one."""
    common = intersect(box, hole)
    if common is None:
        return [box]
    parts = []
    # Axis by axis, the slabs before and after the hole; later slabs have only the hole's range of earlier axes.
    for axis, ((start, stop), (first, last)) in enumerate(zip(box, common, strict=True)):
        for low, high in ((start, first), (last, stop)):
            if low < high:
                parts.append((*common[:axis], (low, high), *box[axis + 1 :]))
    return parts


def check_shard(parameter: str, shard: Shard) -> None:
    """Checks that every element of a shard is written exactly once."""
    for piece in shard.pieces:
        stacked = len(piece.target) - len(piece.source)
        if stacked < 0 or box_shape(piece.target)[stacked:] != box_shape(piece.source):
            raise UserError(
                f"{parameter}: a box of shape {box_shape(piece.source)} of {piece.tensor} is mapped to a box of shape "
                f"{box_shape(piece.target)}. Trace the table again, or correct it."
            )
    if shard.order and sorted(shard.order) != list(range(len(shard.shape))):
        raise UserError(f"{parameter}: {shard.order} is no order of {len(shard.shape)} dimensions.")
    boxes = [*(piece.target for piece in shard.pieces), *shard.padding]
    whole = full_box(shard.shape)
    for box in boxes:
        if len(box) != len(whole) or intersect(box, whole) != box:
            raise UserError(f"{parameter}: the box {box} is outside the shape {shard.shape} of the parameter.")
    if twice := first_overlap(boxes):
        raise UserError(f"{parameter}: the box {intersect(*twice)} is written twice.")
    if missing := math.prod(shard.shape) - sum(map(numel, boxes)):
        raise UserError(f"{parameter}: {missing} of {math.prod(shard.shape)} elements have no source tensor.")


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Returns two boxes of one tensor with elements in common; None where all are disjoint."""
    if len(boxes) < 2:
        return None
    index = BoxIndex(boxes)
    for number, box in enumerate(boxes):
        for other in index.candidates(box):
            if other != number and intersect(box, boxes[other]) is not None:
                return box, boxes[other]
    return None
