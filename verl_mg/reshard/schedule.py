"""Messages of one rank of a plan, in buckets: made once, and used for every weight sync.

    transfers to and from one peer, in order  ->  messages: small boxes merged, large boxes cut and alone
    all messages of a rank, in one order that all ranks share  ->  buckets of a fixed size

Two buckets are in flight. There is no deadlock: of all messages that are not complete, the first in the common order is
at the front of the buckets of both its ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from verl_mg.reshard.plan import Copy, Plan, Transfer
from verl_mg.sharding.boxes import Box, numel, split, translate_box

BUCKET_BYTES = 32 * 2**20
"""Default size of a bucket in bytes."""
MESSAGES_PER_BUCKET = 4  # a message fills at most this part of a bucket, so that several peers are served at once
ALONE_BYTES = 2**20  # a box of this size is a message of its own: where it is contiguous it needs no packing


@dataclass(frozen=True, slots=True)
class Segment:
    """A box of a parameter of this rank, as part of a message."""

    tensor: str
    """Hugging Face name of the tensor."""
    box: Box
    """Box in the tensor."""
    parameter: str
    """Parameter of this rank that contains the box."""
    parameter_box: Box
    """Box of the same elements in the parameter."""

    @property
    def num_elements(self) -> int:
        """Number of elements on the wire."""
        return numel(self.parameter_box)


@dataclass(frozen=True, slots=True)
class Message:
    """Segments that are sent to a peer or received from it together."""

    peer: int
    """The other global rank."""
    outgoing: bool
    """True if this rank sends the message, False if it receives it."""
    forwarded: bool
    """Whether the sender received the segments for its own target before."""
    dtype: torch.dtype
    """Type of all elements on the wire."""
    segments: tuple[Segment, ...]
    """Segments in the order of the elements on the wire."""

    @property
    def num_elements(self) -> int:
        """Number of elements on the wire."""
        return sum(segment.num_elements for segment in self.segments)

    @property
    def nbytes(self) -> int:
        """Number of bytes on the wire."""
        return self.num_elements * self.dtype.itemsize


@dataclass
class Bucket:
    """Messages that are in flight together."""

    messages: list[Message]
    """Messages in the order that all ranks share."""
    waits_for_previous: bool = False
    """Whether it forwards boxes that the previous bucket receives."""

    @property
    def nbytes(self) -> int:
        """Bytes of all messages, each aligned for every dtype."""
        return sum(aligned(message.nbytes) for message in self.messages)


@dataclass(frozen=True)
class Schedule:
    """All copies and messages of one rank in one weight sync."""

    rank: int
    """Global rank."""
    source_shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the rank's source parameters."""
    target_shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the rank's target parameters."""
    copies: tuple[Copy, ...]
    """Copies within the rank."""
    buckets: tuple[Bucket, ...]
    """Buckets of messages in order."""

    @property
    def bytes_received(self) -> int:
        """Bytes received over the wire."""
        return sum(m.nbytes for bucket in self.buckets for m in bucket.messages if not m.outgoing)


def aligned(nbytes: int) -> int:
    """Returns the next multiple of 16 bytes."""
    return -(-nbytes // 16) * 16


def schedule(plan: Plan, rank: int, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> Schedule:
    """Returns the schedule of one rank; all ranks must pass the same plan, dtype and bucket size.

    Args:
        plan: the plan.
        rank: global rank.
        dtype: type of the elements on the wire, except for tensors that stay float32.
        bucket_bytes: size of a bucket in bytes; a box larger than a quarter of it is cut.
    """
    moves = plan.rank_plan(rank)
    keyed = [
        item
        for outgoing, transfers in ((True, moves.sends), (False, moves.receives))
        for item in _messages(plan, rank, outgoing, transfers, dtype, bucket_bytes // MESSAGES_PER_BUCKET)
    ]
    keyed.sort(key=lambda item: item[0])
    return Schedule(
        rank,
        {name: shard.shape for name, shard in plan.source.shards(rank).items()},
        {name: shard.shape for name, shard in plan.target.shards(rank).items()},
        moves.copies,
        tuple(_buckets([message for _, message in keyed], bucket_bytes)),
    )


Key = tuple[int, bool, int, int, int]


def _messages(
    plan: Plan, rank: int, outgoing: bool, transfers: tuple[Transfer, ...], dtype: torch.dtype, limit: int
) -> Iterator[tuple[Key, Message]]:
    """Yields (position in the order of all messages of all ranks, message), for one direction."""
    streams: dict[tuple[int, bool, torch.dtype], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        wire_dtype = torch.float32 if plan.source.tensors[transfer.tensor].float32 else dtype
        streams[transfer.peer, transfer.forwarded, wire_dtype].append(transfer)
    for (peer, forwarded, wire_dtype), stream in streams.items():
        ends = (rank, peer) if outgoing else (peer, rank)
        for number, segments in enumerate(_merged(stream, limit, wire_dtype)):
            # A forwarded message comes after every message that its segments may arrive in.
            position = plan.position(segments[-1 if forwarded else 0].tensor)
            message = Message(peer, outgoing, forwarded, wire_dtype, tuple(segments))
            yield (position, forwarded, *ends, number), message


def _merged(stream: list[Transfer], limit: int, dtype: torch.dtype) -> Iterator[list[Segment]]:
    """Yields runs of segments of at most `limit` bytes; both ends of a stream yield the same runs."""
    run: list[Segment] = []
    size = 0
    for transfer in stream:
        for box in split(transfer.box, max(1, limit // dtype.itemsize)):
            at = translate_box(box, transfer.box, transfer.parameter_box)
            segment = Segment(transfer.tensor, box, transfer.parameter, at)
            nbytes = segment.num_elements * dtype.itemsize
            if run and (size + nbytes > limit or nbytes >= ALONE_BYTES):
                yield run
                run, size = [], 0
            run.append(segment)
            size += nbytes
            if nbytes >= ALONE_BYTES:
                yield run
                run, size = [], 0
    if run:
        yield run


def _buckets(messages: list[Message], limit: int) -> Iterator[Bucket]:
    bucket = Bucket([])
    size = 0
    received: set[tuple[str, Box]] = set()
    for message in messages:
        # A forwarded box must arrive in the previous bucket or earlier.
        waits = message.outgoing and message.forwarded and any((s.tensor, s.box) in received for s in message.segments)
        if bucket.messages and (waits or size + aligned(message.nbytes) > limit):
            yield bucket
            bucket, size, received = Bucket([]), 0, set()
        bucket.messages.append(message)
        bucket.waits_for_previous |= message.outgoing and message.forwarded
        size += aligned(message.nbytes)
        if not message.outgoing:
            received.update((segment.tensor, segment.box) for segment in message.segments)
    if bucket.messages:
        yield bucket
