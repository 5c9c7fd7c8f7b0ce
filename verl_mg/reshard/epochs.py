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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from verl_mg.reshard.routing import BoxRouting, places
from verl_mg.sharding.boxes import Box, largest_part, numel

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
        self._messages = [route.messages for route in routes]
        # Those that send or receive any of the boxes, in rising order.
        self.ranks = routes[0].messages[0] if len(routes) == 1 else self._involved()

    @property
    def largest_box(self) -> int:
        """Elements of the largest box."""
        return max((numel(box) for box in self._boxes), default=0)

    def elements(self, parts: int) -> IntArray:
        """Returns (2, n) what each of `ranks` (n,) sends and receives of the largest of `parts` parts of a tensor.

        Elements in the tensor's epoch, elements that are forwarded LAG epochs later.
        """
        sizes = [largest_part(box, parts) for box in self._boxes]
        if len(sizes) == 1:
            return self._messages[0][1] * sizes[0]
        total = np.zeros((2, 1 + int(self.ranks.max(initial=-1))), np.int64)
        for size, (ranks, counts) in zip(sizes, self._messages, strict=True):
            total[0, ranks] += counts[0] * size
            total[1, ranks] += counts[1] * size
        return total[:, self.ranks]

    def _involved(self) -> IntArray:
        size = 1 + max((int(ranks[-1]) for ranks, _ in self._messages if len(ranks)), default=-1)
        involved = np.zeros(size, bool)
        for ranks, _ in self._messages:
            involved[ranks] = True
        return np.flatnonzero(involved)


class Patterns:
    """Patterns of tensors with equal flows, which differ by whose turn it is to send."""

    def __init__(self, flows: Sequence[Flow]) -> None:
        self._flows = flows
        self._turns = tuple(sorted({size for flow in flows for size in flow.routing.turns}))
        self._patterns: dict[tuple[int, ...], Pattern] = {}

    def of(self, rotations: Mapping[str, int]) -> dict[str, Pattern]:
        """Returns the pattern of each tensor, by the number at which its rotation is."""
        if not self._turns:
            return dict.fromkeys(rotations, self._at(0))
        return {name: self._at(rotation) for name, rotation in rotations.items()}

    def _at(self, rotation: int) -> Pattern:
        key = places(rotation, self._turns)
        if key not in self._patterns:
            self._patterns[key] = Pattern(self._flows, rotation)
        return self._patterns[key]


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


class EpochCutter:
    """Cuts tensors into epochs of at most `limit` bytes; what it knows of patterns serves all chunks of a plan."""

    def __init__(self, patterns: Iterable[Pattern], limit: int) -> None:
        distinct = dict.fromkeys(patterns)  # by identity
        self._limit = limit
        self._size = 1 + max((int(pattern.ranks.max(initial=0)) for pattern in distinct), default=0)
        arrays = (pairs for pattern in distinct for pairs in (*pattern.direct, *pattern.forwarded))
        everything = list({id(pairs): pairs for pairs in arrays}.values())
        # Where no rank has more peers than the limit, no epoch can exceed it, and nothing is counted.
        self._counts_operations = _busiest(everything) > MAX_OPERATIONS
        self._loads: dict[tuple[Pattern, int], _Load] = {}

    def cut(self, tensors: Iterable[tuple[str, Pattern, int]]) -> Epochs:
        """Returns the epochs of tensors (name, pattern, bytes of an element) in the common order."""
        filling = _Filling(self._size, self._limit, self._counts_operations)
        epochs: dict[str, Sequence[int]] = {}
        patterns: dict[str, Pattern] = {}
        for name, pattern, itemsize in tensors:
            key = pattern, itemsize
            if key not in self._loads:
                self._loads[key] = _load(pattern, itemsize, self._limit)
            epochs[name] = filling.add(self._loads[key])
            patterns[name] = pattern
        return Epochs(epochs, patterns)


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
    elements = pattern.elements(parts)
    while (largest := int(elements.sum(0).max(initial=0)) * itemsize) > limit:
        more = max(parts + 1, -(-largest * parts // limit))
        smaller = pattern.elements(more)
        if not smaller[0].any() or smaller.sum(0).max() * itemsize >= largest:
            break  # the parts are single elements
        parts, elements = more, smaller
    direct, forwarded = elements * itemsize
    alone = parts > 1 or pattern.largest_box * itemsize >= ALONE_BYTES
    return _Load(pattern, parts, alone, direct, forwarded, bool(forwarded.any()))


class _Filling:
    """The epoch that is being filled, and what earlier ones forward in it and in the next."""

    def __init__(self, size: int, limit: int, counts_operations: bool) -> None:
        self._limit, self._counts_operations = limit, counts_operations
        self._nothing = np.zeros(size, np.int64)
        self._number = 0
        # Bytes that are forwarded in this epoch, in the next ..., and the messages. `_nothing` is compared by identity:
        # it needs no look at the bytes of all ranks.
        self._waiting: deque[tuple[IntArray, list[IntArray]]] = deque([(self._nothing, [])] * LAG)
        self._is_quiet = True  # whether nothing is forwarded in this epoch or the next
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
        if self._is_quiet and not load.forwards:  # most tensors: one after the other
            self._number += load.parts
            return range(self._number - load.parts, self._number)
        epochs: list[int] = []
        # After LAG parts, each shares its epoch with what an equal part forwards. That fits, because `_load` cuts parts
        # whose direct and forwarded bytes together are within the limit: these need not be placed one by one.
        for _ in range(min(load.parts, LAG)):
            epochs.append(self._place(load))
            self._close()
        following = range(self._number, self._number + load.parts - len(epochs))
        if following and load.forwards:
            self._waiting = deque([(self._scattered(load), load.pattern.forwarded)] * LAG)
            self._is_quiet = False
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
        self._is_quiet = all(waiting is self._nothing for waiting, _ in self._waiting)
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
    numbers = np.concatenate([pairs[:, 0] << 32 | pairs[:, 1] for pairs in several])
    numbers.sort()  # faster than `np.unique`, which hashes
    return np.stack(np.divmod(numbers[np.diff(numbers, prepend=-1) != 0], 1 << 32), axis=1)


def _busiest(several: Sequence[IntArray]) -> int:
    return int(np.bincount(_distinct(several).ravel(), minlength=1).max())
