"""Model of NCCL's grouped sends and receives: tells which ranks never finish.

A group of sends and receives is one kernel. What NCCL does with it, by `enqueue.cc` of its versions 2.22 to 2.30:

round     Every rank passes through the same rounds (`p2pSchedule`). In round (n, l) a rank sends to the rank l places
          after it on the n-th node after it, and receives from the mirror image. A message is in the same round at
          both ends.
pass      In each pass over the rounds a rank takes the next message of each peer and direction. The second message of
          a peer and direction in one group is in the second pass.
channel   A message is cut over channels, which depend on its round alone.
batch     A channel's works are batches: at most 8 rounds, none of them twice. The works of a batch progress together,
          the next batch of the channel starts when all are complete.
kernel    It ends when all batches of all its channels are complete. Kernels of a communicator run in order.
buffer    A send is complete when its receive is in a current batch, or when its bytes fit the connection's buffer.

The model leaves out time, kernels cut in two by a full work queue, and NVLink's direct copies, which buffer nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import torch

from verl_mg.reshard import BUCKET_BYTES, Plan, schedule

WORKS_PER_BATCH = 8  # NCCL_MAX_DEV_WORK_P2P_PER_BATCH
RANKS_PER_CHANNEL_BASE = 8  # NCCL_MAX_DEV_WORK_P2P_PER_BATCH too, in `ncclP2pChannelBaseForRound`


class Operation(NamedTuple):
    """A send or a receive of a group call."""

    peer: int
    outgoing: bool
    nbytes: int


Groups = Mapping[int, Sequence[Sequence[Operation]]]
"""The group calls of each rank, in order."""


class End(NamedTuple):
    """One end of the part of a message that a channel carries."""

    sender: int
    receiver: int
    number: int  # of the message, among all from this sender to this receiver
    channel: int
    outgoing: bool

    @property
    def other(self) -> End:
        """The other end of the same part."""
        return self._replace(outgoing=not self.outgoing)

    @property
    def connection(self) -> tuple[int, int, int]:
        """What the buffer belongs to."""
        return self.sender, self.receiver, self.channel


Kernel = dict[int, list[list[End]]]
"""The batches of each channel."""


@dataclass(frozen=True)
class Communicator:
    """Ranks with their nodes and channels; the defaults are those of eight ranks that NVLink connects."""

    ranks: Sequence[int]
    ranks_per_node: int
    channels: int = 32
    channels_per_peer: int = 32

    def rounds(self) -> list[tuple[int, int]]:
        """Returns the distance of each round, in nodes and in places on the node."""
        nodes, result, node = -(-len(self.ranks) // self.ranks_per_node), [], 0
        node_mask, local_mask = _power_of_two(nodes) - 1, _power_of_two(self.ranks_per_node) - 1
        for node_round in range(node_mask + 1):
            if node < nodes:
                local = 0
                for local_round in range(local_mask + 1):
                    if local < self.ranks_per_node:
                        result.append((node, local))
                    local = (local + local_round + 1) & local_mask
            node = (node + node_round + 1) & node_mask
        return result

    def channels_of(self, number: int) -> list[int]:
        """Returns the channels that carry the messages of a round."""
        each = self.channels_per_peer
        while each * len(self.ranks) > self.channels and each > 1:
            each //= 2
        if len(self.ranks) > self.ranks_per_node:
            node, local = divmod(number, self.ranks_per_node)
            number = node * -(-self.ranks_per_node // RANKS_PER_CHANNEL_BASE) + local // RANKS_PER_CHANNEL_BASE
        bits = self.channels.bit_length() - 1
        base = _reversed_bits(number % self.channels, bits)
        return [(base + _reversed_bits(part, bits)) % self.channels for part in range(each)]

    def distance(self, sender: int, receiver: int) -> tuple[int, int]:
        """Returns the distance from a rank to another one, in nodes and in places on the node."""
        node = self.ranks_per_node
        (a, i), (b, j) = (divmod(self.ranks.index(rank), node) for rank in (sender, receiver))
        return (b - a) % -(-len(self.ranks) // node), (j - i) % node


def groups_of(moves: Plan, bucket_bytes: int = BUCKET_BYTES, tensors: Collection[str] | None = None) -> Groups:
    """The group calls of all ranks of a plan, for some of its tensors or for all."""
    ranks = sorted({*moves.source.ranks, *moves.target.ranks})
    return {
        rank: [
            [Operation(message.peer, message.outgoing, message.nbytes) for message in bucket.messages]
            for bucket in schedule(moves, rank, torch.bfloat16, bucket_bytes, tensors).buckets
        ]
        for rank in ranks
    }


def stuck_ranks(groups: Groups, communicator: Communicator, buffer_bytes: float) -> dict[int, int]:
    """Returns the ranks that never finish, and the number of the group in which each of them stays."""
    return _Run(groups, communicator, buffer_bytes).run()


class _Run:
    """One run of all ranks, until all have finished or nothing moves."""

    def __init__(self, groups: Groups, communicator: Communicator, buffer_bytes: float) -> None:
        self._buffer_bytes = buffer_bytes
        self._part_bytes: dict[tuple[int, int, int], float] = {}  # by sender, receiver and number of the message
        self._kernels = dict(_kernels(groups, communicator, self._part_bytes))
        self._current = dict.fromkeys(groups, -1)  # kernel of each rank
        self._batch: dict[tuple[int, int], int] = {}  # current batch, by rank and channel
        self._works_left: Counter[tuple[int, int]] = Counter()  # of the current batch, by rank and channel
        self._channels_left: Counter[int] = Counter()  # of the current kernel, by rank
        self._active: set[End] = set()
        self._complete: set[End] = set()
        self._buffered: Counter[tuple[int, int, int]] = Counter()
        self._blocked: dict[tuple[int, int, int], list[End]] = defaultdict(list)  # sends, by connection
        self._news: deque[End] = deque()

    def run(self) -> dict[int, int]:
        for rank in self._kernels:
            self._next_kernel(rank)
        while self._news:
            end = self._news.popleft()
            if end not in self._complete:
                self._progress(end)
        return {rank: at for rank, at in self._current.items() if at < len(self._kernels[rank])}

    def _next_kernel(self, rank: int) -> None:
        self._current[rank] += 1
        if self._current[rank] < len(self._kernels[rank]):
            kernel = self._kernels[rank][self._current[rank]]
            self._channels_left[rank] = len(kernel)
            for channel in kernel:
                self._start(rank, channel, 0)

    def _start(self, rank: int, channel: int, number: int) -> None:
        """Starts a batch of the rank's current kernel."""
        batch = self._kernels[rank][self._current[rank]][channel][number]
        self._batch[rank, channel], self._works_left[rank, channel] = number, len(batch)
        self._active.update(batch)
        self._news.extend(batch)

    def _progress(self, end: End) -> None:
        if end.other in self._active:
            self._finish(end)
            self._finish(end.other)
        elif not end.outgoing and end.other in self._complete:
            self._buffered[end.connection] -= self._part_bytes[end[:3]]
            self._finish(end)
            self._news.extend(self._blocked.pop(end.connection, ()))
        elif end.outgoing and self._buffered[end.connection] + self._part_bytes[end[:3]] <= self._buffer_bytes:
            self._buffered[end.connection] += self._part_bytes[end[:3]]
            self._finish(end)
        elif end.outgoing:
            self._blocked[end.connection].append(end)

    def _finish(self, end: End) -> None:
        self._active.discard(end)
        self._complete.add(end)
        rank = end.sender if end.outgoing else end.receiver
        self._works_left[rank, end.channel] -= 1
        if self._works_left[rank, end.channel]:
            return
        following = self._batch[rank, end.channel] + 1
        if following < len(self._kernels[rank][self._current[rank]][end.channel]):
            self._start(rank, end.channel, following)
            return
        self._channels_left[rank] -= 1
        if not self._channels_left[rank]:
            self._next_kernel(rank)


def _kernels(
    groups: Groups, communicator: Communicator, part_bytes: dict[tuple[int, int, int], float]
) -> Iterator[tuple[int, list[Kernel]]]:
    """Yields each rank's kernels, and notes the bytes of a message on each of its channels in `part_bytes`."""
    number_of = {distance: number for number, distance in enumerate(communicator.rounds())}
    channels_of = [communicator.channels_of(number) for number in range(len(number_of))]
    round_of: dict[tuple[int, int], int] = {}
    for rank, calls in groups.items():
        numbers: dict[tuple[int, int], Iterator[int]] = defaultdict(count)
        kernels: list[Kernel] = []
        for call in filter(None, calls):
            works: dict[tuple[int, int], list[tuple[int, int, int, bool]]] = defaultdict(list)  # by pass and round
            passes: Counter[tuple[int, bool]] = Counter()
            for operation in call:
                ends = (rank, operation.peer) if operation.outgoing else (operation.peer, rank)
                if ends not in round_of:
                    round_of[ends] = number_of[communicator.distance(*ends)]
                message = (*ends, next(numbers[ends]))
                part_bytes[message] = operation.nbytes / len(channels_of[round_of[ends]])
                key = (operation.peer, operation.outgoing)
                works[passes[key], round_of[ends]].append((*message, operation.outgoing))
                passes[key] += 1
            kernels.append(_batches(works, channels_of))
        yield rank, kernels


def _batches(works: Mapping[tuple[int, int], list[tuple[int, int, int, bool]]], channels_of: list[list[int]]) -> Kernel:
    kernel: Kernel = defaultdict(list)
    rounds_in_batch: dict[int, set[int]] = {}
    for (_, number), messages in sorted(works.items()):
        for channel in channels_of[number]:
            rounds = rounds_in_batch.get(channel)
            if rounds is None or len(rounds) == WORKS_PER_BATCH or number in rounds:
                rounds_in_batch[channel] = rounds = set()
                kernel[channel].append([])
            rounds.add(number)
            kernel[channel][-1] += [End(*message, channel, outgoing) for *message, outgoing in messages]
    return kernel


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _reversed_bits(number: int, bits: int) -> int:
    return int(f"{number:0{bits}b}"[::-1], 2) if bits else 0
