"""One rank's part of a plan as messages in buckets: made once, the same in every sync.

    transfers to and from one peer, in order  ->  messages: small boxes merged, large ones cut and alone
    all messages of a rank, in one order that all ranks share  ->  buckets of a set size

Two buckets are in flight. No rank can wait for another in a circle: of all messages that are not done, the first in
the common order has both its ends at the front of their ranks' buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from verl_mg.reshard.plan import Copy, Plan, Transfer
from verl_mg.sharding.boxes import Box, numel, split, translate_box

BUCKET_BYTES = 32 * 2**20
MESSAGES_A_BUCKET = 4  # a message fills at most this part of a bucket, so that several peers are served at once
ALONE_BYTES = 2**20  # a box of this size is a message of its own: where it is contiguous it needs no packing


@dataclass(frozen=True, slots=True)
class Segment:
    """A box of a parameter of this rank, in a message."""

    tensor: str
    box: Box
    parameter: str
    at: Box

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return numel(self.at)


@dataclass(frozen=True, slots=True)
class Message:
    """Parts that go to a peer or come from it together, all of one dtype."""

    peer: int
    outgoing: bool
    forwarded: bool
    dtype: torch.dtype
    parts: tuple[Segment, ...]

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return sum(part.elements for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.elements * self.dtype.itemsize


@dataclass
class Bucket:
    """Messages in flight together. One that `follows` sends on what the bucket before has received."""

    messages: list[Message]
    waits_for_previous: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all its messages, each on a boundary that fits every dtype."""
        return sum(aligned(message.nbytes) for message in self.messages)


@dataclass(frozen=True)
class Schedule:
    """All that one rank does in a sync, and the shapes of the parameters that it does it with."""

    rank: int
    source_shapes: Mapping[str, tuple[int, ...]]
    target_shapes: Mapping[str, tuple[int, ...]]
    copies: tuple[Copy, ...]
    buckets: tuple[Bucket, ...]

    @property
    def bytes_received(self) -> int:
        """Bytes that come over the wire."""
        return sum(m.nbytes for bucket in self.buckets for m in bucket.messages if not m.outgoing)


def aligned(nbytes: int) -> int:
    """The next multiple of 16."""
    return -(-nbytes // 16) * 16


def schedule(plan: Plan, rank: int, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> Schedule:
    """The schedule of a rank, for weights that are sent as `dtype`.

    All ranks must give the same plan, dtype and bucket size. A box larger than a quarter of a bucket is cut.
    """
    part = plan.of(rank)
    keyed = [
        item
        for outgoing, transfers in ((True, part.sends), (False, part.receives))
        for item in _messages(plan, rank, outgoing, transfers, dtype, bucket_bytes // MESSAGES_A_BUCKET)
    ]
    keyed.sort(key=lambda item: item[0])
    return Schedule(
        rank,
        {name: shard.shape for name, shard in plan.source.shards(rank).items()},
        {name: shard.shape for name, shard in plan.target.shards(rank).items()},
        part.copies,
        tuple(_buckets([message for _, message in keyed], bucket_bytes)),
    )


Key = tuple[int, bool, int, int, int]


def _messages(
    plan: Plan, rank: int, outgoing: bool, transfers: tuple[Transfer, ...], dtype: torch.dtype, limit: int
) -> Iterator[tuple[Key, Message]]:
    """(its place in the order of all messages of all ranks, message), for one direction."""
    streams: dict[tuple[int, bool, torch.dtype], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        own = torch.float32 if plan.source.tensors[transfer.tensor].float32 else dtype
        streams[transfer.peer, transfer.forwarded, own].append(transfer)
    for (peer, forwarded, own), stream in streams.items():
        ends = (rank, peer) if outgoing else (peer, rank)
        for number, parts in enumerate(_merged(stream, limit, own)):
            # A relayed message goes after everything that its parts could have come in.
            position = plan.position(parts[-1 if forwarded else 0].tensor)
            yield (position, forwarded, *ends, number), Message(peer, outgoing, forwarded, own, tuple(parts))


def _merged(stream: list[Transfer], limit: int, dtype: torch.dtype) -> Iterator[list[Segment]]:
    """Runs of parts of at most `limit` bytes; both ends of a stream come to the same."""
    run: list[Segment] = []
    size = 0
    for transfer in stream:
        for box in split(transfer.box, max(1, limit // dtype.itemsize)):
            part = Segment(transfer.tensor, box, transfer.parameter, translate_box(box, transfer.box, transfer.at))
            own = part.elements * dtype.itemsize
            if run and (size + own > limit or own >= ALONE_BYTES):
                yield run
                run, size = [], 0
            run.append(part)
            size += own
            if own >= ALONE_BYTES:
                yield run
                run, size = [], 0
    if run:
        yield run


def _buckets(messages: list[Message], limit: int) -> Iterator[Bucket]:
    bucket = Bucket([])
    size = 0
    received: set[tuple[str, Box]] = set()
    for message in messages:
        # What is passed on must have arrived: in the bucket before at the latest.
        waits = message.outgoing and message.forwarded and any((p.tensor, p.box) in received for p in message.parts)
        if bucket.messages and (waits or size + aligned(message.nbytes) > limit):
            yield bucket
            bucket, size, received = Bucket([]), 0, set()
        bucket.messages.append(message)
        bucket.waits_for_previous |= message.outgoing and message.forwarded
        size += aligned(message.nbytes)
        if not message.outgoing:
            received.update((part.tensor, part.box) for part in message.parts)
    if bucket.messages:
        yield bucket
