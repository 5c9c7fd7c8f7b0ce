"""Boxes of elements, and the shards that are put together from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from verl_mg.errors import UserError

Box = tuple[tuple[int, int], ...]
"""Half-open ranges, one a dimension: ((0, 4), (8, 16)) is rows 0..3 of columns 8..15."""


@dataclass(frozen=True)
class Piece:
    """The box `source` of the Hugging Face tensor `tensor`, standing at the box `target` of a shard.

    A shard may stack tensors: its leading dimensions that the tensor lacks are then 1 long in `target`.
    """

    tensor: str
    source: Box
    target: Box


@dataclass(frozen=True)
class Shard:
    """A parameter as one rank holds it: its shape, its pieces, and the boxes that are declared padding."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    padding: tuple[Box, ...] = ()


def full_box(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The elements in both boxes, or None."""
    if a == b:
        return a
    common = tuple((max(s, t), min(u, v)) for (s, u), (t, v) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def translate_box(inner: Box, origin: Box, destination: Box) -> Box:
    """`inner`, a part of `origin`, at the same place in the equally large `destination`, which may be stacked."""
    stacked = len(destination) - len(origin)
    if inner == origin:
        return destination
    return destination[:stacked] + tuple(
        (start - o + d, stop - o + d)
        for (start, stop), (o, _), (d, _) in zip(inner, origin, destination[stacked:], strict=True)
    )


def split(box: Box, limit: int) -> Iterator[Box]:
    """The box in parts of at most `limit` elements, cut along its first dimensions."""
    if numel(box) <= limit:
        yield box
        return
    axis = next(i for i, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[axis]
    step = max(1, limit * (stop - start) // numel(box))
    for first in range(start, stop, step):
        yield from split((*box[:axis], (first, min(first + step, stop)), *box[axis + 1 :]), limit)


def contiguous_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements start..stop - 1 of a flattened tensor as boxes, each contiguous in memory, one after another."""
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


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index of a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def check_shard(parameter: str, shard: Shard) -> None:
    """UserError naming the box where a shard is not written exactly once, or where a piece does not fit."""
    for piece in shard.pieces:
        stacked = len(piece.target) - len(piece.source)
        if stacked < 0 or box_shape(piece.target)[stacked:] != box_shape(piece.source):
            raise UserError(
                f"{parameter}: a box of {box_shape(piece.source)} of {piece.tensor} "
                f"stands in one of {box_shape(piece.target)}"
            )
    boxes = sorted([piece.target for piece in shard.pieces] + list(shard.padding))
    for number, box in enumerate(boxes):
        if len(box) != len(shard.shape) or intersect(box, full_box(shard.shape)) != box:
            raise UserError(f"{parameter}: the box {box} is not inside its shape {shard.shape}")
        for other in boxes[number + 1 :]:
            if other[0][0] >= box[0][1]:  # sorted: none further on can meet it
                break
            if common := intersect(box, other):
                raise UserError(f"{parameter}: the box {common} is written twice")
    if missing := math.prod(shard.shape) - sum(map(numel, boxes)):
        raise UserError(f"{parameter}: {missing} of its {math.prod(shard.shape)} elements come from nowhere")
