"""Boxes of elements, and the shards that are put together from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""Half-open ranges, one a dimension: ((0, 4), (8, 16)) is rows 0..3 of columns 8..15."""


@dataclass(frozen=True)
class Piece:
    """The box `source` of the Hugging Face tensor `tensor`, standing at the box `target` of a shard."""

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


def extents(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(extents(box))


def intersect(a: Box, b: Box) -> Box | None:
    """The elements in both boxes, or None."""
    common = tuple((max(s, t), min(u, v)) for (s, u), (t, v) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def carry(inner: Box, origin: Box, destination: Box) -> Box:
    """`inner`, a part of `origin`, at the same place in the equally large `destination`."""
    return tuple(
        (start - o + d, stop - o + d)
        for (start, stop), (o, _), (d, _) in zip(inner, origin, destination, strict=True)
    )


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index of a tensor."""
    return tuple(slice(start, stop) for start, stop in box)
