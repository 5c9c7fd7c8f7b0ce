"""Messages of one rank of a plan, in buckets: made once, and used for every weight sync.

    the plan of t (4, 2) that `plan` shows, in bfloat16, on rank 0:

    copies    t rows 0:2, column 0
    bucket    epoch 0
              receive from 1    t rows 2:4, column 0    4 bytes
              send to 1         t rows 0:2, column 1    4 bytes

A bucket is what a rank sends and receives in one epoch (`epochs.py`), in one call of `batch_isend_irecv`. Two buckets
are in flight. Over gloo the messages of a bucket progress independently of each other. NCCL is stricter. Its rules, by
its `enqueue.cc`:

- A group of sends and receives is one kernel. The kernels of a communicator run one after another on each rank.
- A kernel passes through rounds. A message is in the same round at both ends: the round is the distance from its sender
  to its receiver. Two messages of one peer and direction are in two passes over the rounds.
- The messages of a channel are in batches, in the order of passes and rounds. A batch starts when the previous one is
  complete. Two messages of one peer and direction never share a batch, and a batch has at most eight rounds.
- Group calls must match: all messages of a group at one end must be in one group at the other ends too. Groups that do
  not match are not an error, but their batches can wait for each other in a circle for ever.

The schedule satisfies them:

- A message is in the same epoch at both ends, because all ranks compute the epochs of all tensors alike. No rank cuts
  its messages by its own load.
- An epoch has one message for each peer and direction: all segments for a peer are merged, whatever their tensors and
  types. So there is one pass, and (epoch, round) is one order of all messages, in which every rank processes its own.
- A box is forwarded LAG epochs after the epoch in which it arrives, on all ranks: no message waits for another one of
  the same epoch.

There is no deadlock. Of all messages that are not complete, take the first one by (epoch, round). At both of its ends
everything before it is complete, so its batch has started there, however NCCL cuts the kernels into channels and
batches. It waits for nothing else, and completes. For gloo the same holds without rounds, by epochs only.

For ranks outside the job, which have no tables, schedules are text: compressed JSON, which is data and never code, of
lists of the fields of each record.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from verl_mg.dtypes import dtype_name, torch_dtype
from verl_mg.reshard.epochs import LAG
from verl_mg.reshard.plan import Copy, Plan
from verl_mg.sharding.boxes import Box, cut, numel, slices, translate_box

if TYPE_CHECKING:
    import torch

# Epochs are cut by the load of the busiest rank, so the buckets of others are not full: this size makes their messages
# large nevertheless. Two buckets in flight are 256 MiB of device memory during a sync.
BUCKET_BYTES = 128 * 2**20  # default size of a bucket in bytes
FORMAT = 2  # number of the format; it changes with the fields
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "int32", "int16", "uint8", "bool")
"""Names of the dtypes in which weights travel."""

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A box of a parameter of this rank, as part of a message."""

    tensor: str
    box: Box  # box in the tensor
    parameter: str  # parameter of this rank that contains the box
    parameter_box: Box  # box of the same elements in the parameter
    dtype: torch.dtype  # type of the elements on the wire
    forwarded: bool  # whether the sender received the box for its own target before, and sends it from there

    @property
    def nbytes(self) -> int:
        """Number of bytes on the wire."""
        return numel(self.parameter_box) * self.dtype.itemsize


@dataclass(frozen=True)
class Message:
    """All segments that are sent to a peer, or received from it, in one epoch."""

    peer: int  # the other global rank
    outgoing: bool  # true if this rank sends the message, False if it receives it
    # Segments in their order on the wire, without gaps: the largest elements first, so that each is aligned.
    segments: tuple[Segment, ...]

    @cached_property
    def sizes(self) -> Sequence[int]:
        """Number of bytes of each segment on the wire."""
        return [segment.nbytes for segment in self.segments]

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes on the wire."""
        return sum(self.sizes)

    @cached_property
    def indices(self) -> Sequence[Index]:
        """Boxes of the segments as indices of their parameters."""
        return [slices(segment.parameter_box) for segment in self.segments]


@dataclass(frozen=True)
class Bucket:
    """Messages of this rank in one call of `batch_isend_irecv`."""

    epoch: int  # number of the epoch, the same on all ranks
    messages: tuple[Message, ...]  # at most one message for each peer and direction

    @property
    def nbytes(self) -> int:
        """Number of bytes of all messages."""
        return sum(message.nbytes for message in self.messages)

    @cached_property
    def forwards(self) -> bool:
        """True if this rank sends boxes that it received in an earlier bucket."""
        return any(segment.forwarded for m in self.messages if m.outgoing for segment in m.segments)


@dataclass(frozen=True)
class Schedule:
    """All copies and messages of one rank in one weight sync."""

    rank: int
    source_shapes: Mapping[str, tuple[int, ...]]  # shapes of the source parameters that are read
    target_shapes: Mapping[str, tuple[int, ...]]  # shapes of the target parameters that are written
    copies: tuple[Copy, ...]
    buckets: tuple[Bucket, ...]  # buckets of messages, in the order of their epochs

    @property
    def bytes_received(self) -> int:
        """Bytes received over the wire."""
        return sum(m.nbytes for bucket in self.buckets for m in bucket.messages if not m.outgoing)

    @cached_property
    def copy_indices(self) -> Sequence[tuple[Index, Index]]:
        """Boxes of the copies as indices of the parameters that they read and write."""
        return [(slices(copy.source_box), slices(copy.target_box)) for copy in self.copies]

    @property
    def source_parameters(self) -> Set[str]:
        """Source parameters that are copied or sent from."""
        return self.source_shapes.keys()

    def segments(self, outgoing: bool, peer: int | None = None) -> Iterator[Segment]:
        """Yields the boxes that are sent or received.

        Args:
            outgoing: True for those that are sent.
            peer: only those to or from this rank; None: all.
        """
        for bucket in self.buckets:
            for message in bucket.messages:
                if message.outgoing == outgoing and peer in (None, message.peer):
                    yield from message.segments


def schedule(
    plan: Plan, rank: int, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES, tensors: Collection[str] | None = None
) -> Schedule:
    """Returns the schedule of one rank; all ranks must pass the same plan, dtype, bucket size and tensors.

    Args:
        plan: result of `plan`.
        rank: global rank.
        dtype: type of the elements on the wire, except for tensors that have their own.
        bucket_bytes: bytes that a rank may send and receive in an epoch; larger tensors are cut.
        tensors: those that are moved; None: all. Schedules of parts of the tensors share the plan's routes.
    """
    moves, epochs = plan.rank_plan(rank), plan.epochs(dtype.itemsize, bucket_bytes, tensors)
    if tensors is not None:
        moves = moves.of(tensors)
    contents: dict[int, dict[tuple[int, bool], list[Segment]]] = defaultdict(lambda: defaultdict(list))
    for outgoing, transfers in ((True, moves.sends), (False, moves.receives)):
        for transfer in transfers:
            wire_dtype = plan.source.tensors[transfer.tensor].wire_dtype(dtype)
            parts = epochs.of[transfer.tensor]
            for number, box in cut(transfer.box, len(parts)) if len(parts) > 1 else ((0, transfer.box),):
                at = translate_box(box, transfer.box, transfer.parameter_box)
                segment = Segment(transfer.tensor, box, transfer.parameter, at, wire_dtype, transfer.forwarded)
                epoch = parts[number] + (LAG if transfer.forwarded else 0)
                contents[epoch][transfer.peer, outgoing].append(segment)
    read = [send.parameter for send in moves.sends if not send.forwarded]
    read += (copy.source for copy in moves.copies if not copy.from_target)
    written = [receive.parameter for receive in moves.receives]
    written += (copy.target for copy in moves.copies)
    return Schedule(
        rank,
        {name: moves.source_shapes[name] for name in read},
        {name: moves.target_shapes[name] for name in written},
        moves.copies,
        tuple(Bucket(epoch, _messages(contents[epoch])) for epoch in sorted(contents)),
    )


def _messages(segments: Mapping[tuple[int, bool], list[Segment]]) -> tuple[Message, ...]:
    """Returns messages whose segments start at multiples of their element size."""
    # The sort is stable: segments of one type keep the plan's order of tensors and boxes, the same at both ends.
    return tuple(
        Message(peer, outgoing, tuple(sorted(unordered, key=lambda segment: -segment.dtype.itemsize)))
        for (peer, outgoing), unordered in sorted(segments.items())
    )


def pack_schedules(schedules: Sequence[Schedule]) -> bytes:
    """Returns the schedules of one rank as compressed text."""
    document = {"format": FORMAT, "schedules": [astuple(schedule) for schedule in schedules]}
    return zlib.compress(json.dumps(document, default=dtype_name).encode())


def unpack_schedules(text: bytes) -> list[Schedule]:
    """Reads the result of `pack_schedules`; ValueError for another format, and for a dtype in which nothing travels."""
    document = json.loads(zlib.decompress(text))
    if document["format"] != FORMAT:
        raise ValueError(f"schedules have format {document['format']}, this version of verl_mg reads {FORMAT}")
    return [_schedule(*fields) for fields in document["schedules"]]


def _schedule(rank: int, source_shapes: Any, target_shapes: Any, copies: Any, buckets: Any) -> Schedule:
    return Schedule(
        rank,
        {name: tuple(shape) for name, shape in source_shapes.items()},
        {name: tuple(shape) for name, shape in target_shapes.items()},
        tuple(
            Copy(tensor, source, _box(source_box), target, _box(target_box), from_target)
            for tensor, source, source_box, target, target_box, from_target in copies
        ),
        tuple(
            Bucket(epoch, tuple(Message(peer, outgoing, tuple(map(_segment, parts))) for peer, outgoing, parts in sent))
            for epoch, sent in buckets
        ),
    )


def _segment(fields: Sequence[Any]) -> Segment:
    tensor, box, parameter, parameter_box, dtype, forwarded = fields
    if dtype not in DTYPES:
        raise ValueError(f"{tensor} would travel as {dtype}, this version of verl_mg reads {', '.join(DTYPES)}")
    return Segment(tensor, _box(box), parameter, _box(parameter_box), torch_dtype(dtype), forwarded)


def _box(pairs: Sequence[Sequence[int]]) -> Box:
    return tuple((begin, end) for begin, end in pairs)
