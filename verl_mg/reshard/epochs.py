"""Epochs: which tensors travel together, decided alike on all ranks.

The tensors, in the one order that all ranks know, are cut into epochs where the busiest rank's buffer is full. All
messages of a tensor belong to its epoch, on whatever ranks; a box that a gateway forwards is sent again LAG epochs
later, when it has arrived. A tensor with large boxes has a separate epoch: its messages are single boxes, which need no
packing where they are contiguous. If it is too large for an epoch it is cut into parts, one for each of several epochs.

    tensors   a   b   c        d (too large: 3 parts)      e   f
    epoch     0   0   0    |   1   |   2   |   3       |   4   4
    forwarded 2   2   2        3       4       5           6   6

`schedule` explains why epochs are the same on all ranks. Pure arithmetic on the flows of a plan, whose cost does not
grow with the messages of a rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from verl_mg.reshard.routing import BoxRouting, places
from verl_mg.sharding.boxes import Box, cut, numel

LAG = 2
"""Epochs from the arrival of a box to the epoch in which it is forwarded: as many as are in flight, so that a gateway
never waits for the bucket that it has just started."""
MAX_OPERATIONS = 256  # most sends and receives of a rank in one epoch, unless a single tensor needs more
ALONE_BYTES = 2**20
"""Bytes of a box from which its tensor shares no epoch, so that the box is sent from its parameter without packing."""

IntArray = npt.NDArray[np.int64]


class Flow(NamedTuple):
    """A box that source and target share, and its routing."""

    box: Box
    routing: BoxRouting


class Pattern:
    """Senders and receivers of the boxes of a tensor; many tensors have the same pattern."""

    def __init__(self, flows: Sequence[Flow], rotation: int) -> None:
        self._boxes = [flow.box for flow in flows]
        routes = [flow.routing.routes(rotation) for flow in flows]
        # Of each box: sender and receiver (m, 2) of its messages, in the tensor's epoch and LAG epochs later.
        self.direct = [route.direct_pairs for route in routes]
        self.forwarded = [route.forwarded_pairs for route in routes]
        self.ranks = np.flatnonzero(np.bincount(np.concatenate([_NONE, *self.direct, *self.forwarded]).ravel()))

    @property
    def largest_box(self) -> int:
        """Elements of the largest box."""
        return max((numel(box) for box in self._boxes), default=0)

    def elements(self, parts: int) -> tuple[IntArray, IntArray]:
        """Returns what each of `ranks` (n,) sends and receives of the largest of `parts` parts of a tensor.

        Elements in the tensor's epoch, elements that are forwarded LAG epochs later.
        """
        sizes = [max(numel(part) for _, part in cut(box, parts)) if parts > 1 else numel(box) for box in self._boxes]
        direct, forwarded = (
            sum((count * size for count, size in zip(counts, sizes, strict=True)), np.zeros(len(self.ranks), np.int64))
            for counts in self._messages
        )
        return direct, forwarded

    @cached_property
    def _messages(self) -> list[list[IntArray]]:
        """Messages of each of `ranks` (n,) for each box, direct and forwarded."""
        size = int(self.ranks.max(initial=0)) + 1
        return [
            [np.bincount(pairs.ravel(), minlength=size)[self.ranks] for pairs in every_box]
            for every_box in (self.direct, self.forwarded)
        ]


def patterns_of(flows: Sequence[Flow], rotations: Mapping[str, int]) -> dict[str, Pattern]:
    """Returns the patterns of tensors with equal flows, which differ by whose turn it is to send."""
    turns = tuple(sorted({size for flow in flows for size in flow.routing.turns}))
    patterns: dict[tuple[int, ...], Pattern] = {}
    for rotation in rotations.values():
        if (key := places(rotation, turns)) not in patterns:
            patterns[key] = Pattern(flows, rotation)
    return {name: patterns[places(rotation, turns)] for name, rotation in rotations.items()}


@dataclass(frozen=True)
class Epochs:
    """The epochs of all tensors of a plan."""

    of: Mapping[str, Sequence[int]]  # {tensor: the epoch of each part of its boxes}
    patterns: Mapping[str, Pattern]  # {tensor: who sends to whom}

    def messages(self) -> dict[int, int]:
        """Returns how many messages each rank sends and receives, counted without its plan; {rank: number}.

        A box with fewer elements than its tensor has parts counts once for each part.
        """
        # Epochs with the same patterns have the same messages, and are counted once: a model repeats them by layer.
        content: dict[int, dict[int, list[IntArray]]] = defaultdict(dict)
        for tensor, epochs in self.of.items():
            pattern = self.patterns[tensor]
            for epoch in epochs:
                content[epoch][id(pattern)] = pattern.direct
                content[epoch + LAG][-id(pattern)] = pattern.forwarded
        times: dict[tuple[int, ...], int] = defaultdict(int)
        pairs: dict[tuple[int, ...], list[IntArray]] = {}
        for arrays in content.values():
            key = tuple(sorted(arrays))
            times[key] += 1
            pairs[key] = [part for parts in arrays.values() for part in parts]
        total: dict[int, int] = defaultdict(int)
        for key, several in pairs.items():
            ranks, counts = np.unique(_distinct(several), return_counts=True)
            for rank, number in zip(ranks.tolist(), counts.tolist(), strict=True):
                total[rank] += number * times[key]
        return dict(total)


def cut_into_epochs(tensors: Iterable[tuple[str, Pattern, int]], limit: int) -> Epochs:
    """Returns the epochs of tensors (name, pattern, bytes of an element) in the common order; `limit` is in bytes."""
    rows = list(tensors)
    patterns = list({id(pattern): pattern for _, pattern, _ in rows}.values())
    size = 1 + max((int(pattern.ranks.max(initial=0)) for pattern in patterns), default=0)
    arrays = (pairs for pattern in patterns for pairs in (*pattern.direct, *pattern.forwarded))
    everything = list({id(pairs): pairs for pairs in arrays}.values())
    # Where no rank has more peers than the limit, no epoch can exceed it, and nothing is counted.
    filling = _Filling(size, limit, counts_operations=_busiest(everything) > MAX_OPERATIONS)
    loads: dict[tuple[int, int], _Load] = {}
    epochs: dict[str, Sequence[int]] = {}
    for name, pattern, itemsize in rows:
        key = id(pattern), itemsize
        if key not in loads:
            loads[key] = _load(pattern, itemsize, limit)
        epochs[name] = filling.add(loads[key])
    return Epochs(epochs, {name: pattern for name, pattern, _ in rows})


class _Load(NamedTuple):
    """Bytes of the largest part of a tensor on each rank of its pattern."""

    pattern: Pattern
    parts: int
    alone: bool
    direct: IntArray
    forwarded: IntArray
    forwards: bool

    @property
    def ranks(self) -> IntArray:
        return self.pattern.ranks


def _load(pattern: Pattern, itemsize: int, limit: int) -> _Load:
    """Returns the load of a tensor that is cut into the fewest parts that fit into an epoch."""
    parts = 1
    direct, forwarded = pattern.elements(parts)
    while (largest := int((direct + forwarded).max(initial=0)) * itemsize) > limit:
        more = max(parts + 1, -(-largest * parts // limit))
        smaller = pattern.elements(more)
        if not smaller[0].any() or (smaller[0] + smaller[1]).max() * itemsize >= largest:
            break  # the parts are single elements
        parts, (direct, forwarded) = more, smaller
    alone = parts > 1 or pattern.largest_box * itemsize >= ALONE_BYTES
    return _Load(pattern, parts, alone, direct * itemsize, forwarded * itemsize, bool(forwarded.any()))


class _Filling:
    """The epoch that is being filled, and what earlier ones forward in it and in the next."""

    def __init__(self, size: int, limit: int, counts_operations: bool) -> None:
        self._limit, self._counts_operations = limit, counts_operations
        self._nothing = np.zeros(size, np.int64)
        self._number = 0
        # Bytes that are forwarded in this epoch, in the next ..., and the messages. `_nothing` is compared by identity:
        # it needs no look at the bytes of all ranks.
        self._waiting: deque[tuple[IntArray, list[IntArray]]] = deque([(self._nothing, [])] * LAG)
        # Bytes that this epoch sends and receives, and that it will forward, and its tensors' loads by identity.
        self._direct: IntArray = self._nothing.copy()
        self._forwarded: IntArray = self._nothing
        self._loads: dict[int, _Load] = {}

    def add(self, load: _Load) -> Sequence[int]:
        """Returns the epochs of the parts of a tensor."""
        if not load.alone:
            return (self._place(load),)
        if self._loads:
            self._close()
        epochs: list[int] = []
        # After LAG parts, each shares its epoch with what an equal part forwards. That fits, because `_load` cuts parts
        # whose direct and forwarded bytes together are within the limit: these need not be placed one by one.
        waits = load.forwards or any(waiting is not self._nothing for waiting, _ in self._waiting)
        for _ in range(min(load.parts, LAG) if waits else 0):
            epochs.append(self._place(load))
            self._close()
        following = range(self._number, self._number + load.parts - len(epochs))
        if following and load.forwards:
            self._waiting = deque([(self._scattered(load), load.pattern.forwarded)] * LAG)
        self._number = following.stop
        return (*epochs, *following)

    def _place(self, load: _Load) -> int:
        while not self._fits(load):
            self._close()
        self._direct[load.ranks] += load.direct
        if load.forwards:
            self._forwarded = self._forwarded + self._scattered(load)
        self._loads[id(load)] = load
        return self._number

    def _fits(self, load: _Load) -> bool:
        waiting, messages = self._waiting[0]
        if not self._loads and waiting is self._nothing:
            return True
        if self._counts_operations and id(load) not in self._loads:
            direct = (pairs for other in (*self._loads.values(), load) for pairs in other.pattern.direct)
            if _busiest([*messages, *direct]) > MAX_OPERATIONS:
                return False
        total = self._direct[load.ranks] + load.direct
        if waiting is not self._nothing or load.forwards or self._forwarded is not self._nothing:
            total += np.maximum(waiting[load.ranks], self._forwarded[load.ranks] + load.forwarded)
        return int(total.max(initial=0)) <= self._limit

    def _close(self) -> None:
        messages = [pairs for load in self._loads.values() for pairs in load.pattern.forwarded]
        self._waiting.append((self._forwarded, messages))
        self._waiting.popleft()
        self._number += 1
        self._direct, self._forwarded, self._loads = self._nothing.copy(), self._nothing, {}

    def _scattered(self, load: _Load) -> IntArray:
        result = self._nothing.copy()
        result[load.ranks] = load.forwarded
        return result


_NONE = np.zeros((0, 2), np.int64)


def _distinct(several: Sequence[IntArray]) -> IntArray:
    """Returns the distinct pairs (n, 2) of sender and receiver: each is one message."""
    if not several:
        return _NONE
    pairs = np.concatenate(several)
    return np.stack(np.divmod(np.unique(pairs[:, 0] << 32 | pairs[:, 1]), 1 << 32), axis=1)


def _busiest(several: Sequence[IntArray]) -> int:
    return int(np.bincount(_distinct(several).ravel(), minlength=1).max())
