"""What must hold before anything is moved: the source covers the target, once, and both mean the same tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from verl_mg.errors import UserError
from verl_mg.sharding.boxes import Box, full_box, intersect, numel
from verl_mg.sharding.shard_map import BoxReplicas, ShardMap


def check(source: ShardMap, target: ShardMap, tensors: Iterable[str]) -> None:
    """UserError naming tensor and box for the first of `tensors` that cannot come from `source` into `target`."""
    if source.tensors is not target.tensors:
        _same_shapes(source, target)
    sound: set[tuple[tuple[Box, ...], tuple[Box, ...]]] = set()
    for name in tensors:
        needed, held = target.places(name), source.places(name)
        boxes = tuple(place.box for place in held), tuple(place.box for place in needed)
        if boxes in sound:  # the same cut of another tensor; names make no difference
            continue
        _apart(name, "source", held)
        _apart(name, "target", needed)
        for place in needed:
            _inside(name, place.box, target.tensors[name].shape)
            if missing := _uncovered(place.box, boxes[0]):
                raise UserError(
                    f"{name}: the box {missing[0]}, which rank {place.ranks[0]} needs for "
                    f"{place.spots[0].parameter}, is nowhere in the source"
                )
        sound.add(boxes)


def _same_shapes(source: ShardMap, target: ShardMap) -> None:
    for name, info in target.tensors.items():
        other = source.tensors.get(name)
        if other is not None and other.shape != info.shape:
            raise UserError(f"{name}: shape {other.shape} in the source, {info.shape} in the target: two models")


def _apart(name: str, side: str, places: Sequence[BoxReplicas]) -> None:
    for a, b in combinations(places, 2):
        common = intersect(a.box, b.box)
        if common and (side == "source" or set(a.ranks).intersection(b.ranks)):
            raise UserError(f"{name}: the box {common} is in the {side} twice, in {a.box} and in {b.box}")


def _inside(name: str, box: Box, shape: tuple[int, ...]) -> None:
    if len(box) != len(shape) or intersect(box, full_box(shape)) != box:
        raise UserError(f"{name}: the box {box} is not inside its shape {shape}")


def _uncovered(box: Box, covers: Sequence[Box]) -> list[Box]:
    """The parts of a box that none of `covers`, which are disjoint, holds."""
    own = [common for cover in covers if (common := intersect(cover, box))]
    if sum(map(numel, own)) == numel(box):
        return []
    left = [box]
    for cover in own:
        left = [part for whole in left for part in _without(whole, cover)]
    return left


def _without(box: Box, hole: Box) -> list[Box]:
    """The parts of a box outside another."""
    common = intersect(box, hole)
    if common is None:
        return [box]
    parts = []
    for axis, ((start, stop), (first, last)) in enumerate(zip(box, common, strict=True)):
        for low, high in ((start, first), (last, stop)):
            if low < high:
                parts.append((*common[:axis], (low, high), *box[axis + 1 :]))
    return parts
