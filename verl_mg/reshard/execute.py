"""Execution of a schedule over a process group.

- Two buckets are in flight: one is packed while the previous one is sent.
- Additional memory is two buffers of the bucket size, whatever the size of the model.
- A source that is computed, such as quantized weights, is computed box by box where it is packed, and for all receivers
  once.
- A message of one box that is contiguous in memory and needs no cast is sent from its parameter, or received into it,
  directly. Other messages are packed: as bytes, so that one message has tensors of several types.

    bucket    0           1           2                        3                        end
    buffer    0           1           0                        1
              launch 0    launch 1    complete 0, launch 2     complete 1, launch 3     complete 2, complete 3

    launch     waits for the source parameters that it reads, packs them, starts all sends and receives of the bucket
    complete   waits for these, and unpacks what has arrived; its buffer is free then
    forward    a bucket that forwards boxes of epoch e - LAG is launched when that epoch is complete

Copies within the rank are made between the buckets, while messages are on their way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from verl_mg.errors import UserError
from verl_mg.lazy_import import lazy_import
from verl_mg.reshard.epochs import LAG
from verl_mg.reshard.plan import Copy
from verl_mg.reshard.schedule import Bucket, Index, Message, Schedule, Segment
from verl_mg.sharding.boxes import Box, box_shape

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor
else:
    torch = lazy_import("torch")
    dist = lazy_import("torch.distributed")

Tensors: TypeAlias = "Mapping[str, Tensor]"


@dataclass(frozen=True)
class Computed:
    """A source parameter whose boxes are computed when they are sent, and which never exists as a whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    write: Callable[[str, Box, Tensor], object]
    """Writes the elements of a tensor that are in a box of the parameter: (tensor, box, target of the box's shape)."""

    def values(self, tensor: str, box: Box) -> Tensor:
        """Returns the elements of a tensor in a box of the parameter.

        Args:
            tensor: Hugging Face name.
            box: box in the parameter, within one piece of the tensor.
        """
        result = torch.empty(box_shape(box), dtype=self.dtype, device=self.device)
        self.write(tensor, box, result)
        return result


Sources: TypeAlias = "Mapping[str, Tensor | Computed]"


@dataclass
class Traffic:
    """Counters of one execution on this rank."""

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0  # duration of the whole execution
    seconds_packing: float = 0.0  # part of `seconds` for packing, unpacking and copying within the rank
    seconds_waiting: float = 0.0  # part of `seconds` for waiting for messages


@dataclass
class _InFlightBucket:
    """Pending requests of a bucket, and the messages to unpack when they are complete."""

    epoch: int
    requests: list[dist.Work]
    arrivals: list[tuple[Message, Tensor]] = field(default_factory=list)


def execute(
    schedule: Schedule,
    source: Sources,
    target: Tensors,
    group: dist.ProcessGroup | None = None,
    wait_for: Callable[[str], object] | None = None,
) -> Traffic:
    """Fills the target parameters in place; every rank of the plan must call it.

    Values are cast to the schedule's dtype before they are sent, and again on arrival where the target has another
    dtype. A target that shares the storage of its source is left unchanged. On CUDA everything is ordered after the
    current stream's work on the sources, and the targets are complete when the call returns.

    Args:
        schedule: result of `schedule` for this rank.
        source: this rank's source parameters, in the planned shapes; computed ones have the dtype of the wire.
        target: this rank's target parameters, in the planned shapes.
        group: process group of all ranks; None for the default group.
        wait_for: called with the name of a source parameter before each read of it, so that values that are still on
            their way arrive while other parameters are sent.

    Returns:
        Bytes and seconds of this rank.

    Raises:
        UserError: a parameter is missing or not of the planned shape; nothing has been written then.
    """
    _check_shapes("source", schedule.source_shapes, source)
    _check_shapes("target", schedule.target_shapes, target)
    return _Execution(schedule, source, target, group, wait_for or (lambda _: None)).run()


class _Execution:
    def __init__(
        self,
        schedule: Schedule,
        source: Sources,
        target: Tensors,
        group: dist.ProcessGroup | None,
        wait_for: Callable[[str], object],
    ) -> None:
        self._schedule, self._group, self._wait_for = schedule, group, wait_for
        self._source = {
            name: value if isinstance(value, Computed) else value.detach() for name, value in source.items()
        }
        self._target = {name: tensor.detach() for name, tensor in target.items()}
        # Computed boxes: places in this rank's target, which of them are written, and places in a bucket's messages.
        self._local: dict[tuple[str, Box], Tensor] = {}
        self._written: set[tuple[str, Box]] = set()
        self._packed: dict[tuple[str, Box], Tensor] = {}
        for copy, (_, written) in zip(schedule.copies, schedule.copy_indices, strict=True):
            if not copy.from_target and isinstance(self._source[copy.source], Computed):
                self._local[copy.source, copy.source_box] = self._target[copy.target][written]
        self._traffic = Traffic()
        self._buffers: dict[int, Tensor] = {}

    def run(self) -> Traffic:
        begin = time.perf_counter()
        in_flight: deque[_InFlightBucket] = deque()
        indexed = list(zip(self._schedule.copies, self._schedule.copy_indices, strict=True))
        copies = [(copy, indices) for copy, indices in indexed if not copy.from_target]
        # An equal part of the copies after the launch of each bucket: they take place while messages are on their way.
        per_bucket = -(-len(copies) // max(1, len(self._schedule.buckets)))
        for number, bucket in enumerate(self._schedule.buckets):
            while in_flight and (len(in_flight) == 2 or (bucket.forwards and in_flight[0].epoch <= bucket.epoch - LAG)):
                self._complete(in_flight.popleft())
            in_flight.append(self._launch(bucket, number % 2))
            self._copy(copies[number * per_bucket : (number + 1) * per_bucket])
        if not self._schedule.buckets:
            self._copy(copies)
        while in_flight:
            self._complete(in_flight.popleft())
        # These read boxes that have arrived, so they come after all buckets.
        self._copy([(copy, indices) for copy, indices in indexed if copy.from_target])
        # GPU: a wait for the copies on this rank's stream.
        # GPU-TEST: none
        # GPU-RAN: h200-1
        for device in {tensor.device for tensor in self._target.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._traffic.seconds = time.perf_counter() - begin
        return self._traffic

    def _launch(self, bucket: Bucket, slot: int) -> _InFlightBucket:
        begin = time.perf_counter()
        in_flight, offset = _InFlightBucket(bucket.epoch, []), 0
        operations = []
        for message in bucket.messages:
            for segment in message.segments:
                if message.outgoing and not segment.forwarded:
                    self._wait_for(segment.parameter)
            views = self._views(message)
            wire = _direct(message, views)
            if wire is None:
                wire = self._buffer(slot, views[0].device)[offset : offset + message.nbytes]
                offset += _aligned(message.nbytes)
                if message.outgoing:
                    for segment, part, view in _parts(message, views, wire):
                        if isinstance(view, Computed):
                            self._compute(view, (segment.parameter, segment.parameter_box), segment.tensor, part)
                        else:
                            part.copy_(view)
                else:
                    in_flight.arrivals.append((message, wire))
            operations.append(
                dist.P2POp(dist.isend if message.outgoing else dist.irecv, wire, message.peer, self._group)
            )
            if message.outgoing:
                self._traffic.bytes_sent += wire.nbytes
            else:
                self._traffic.bytes_received += wire.nbytes
        self._traffic.seconds_packing += time.perf_counter() - begin
        in_flight.requests = dist.batch_isend_irecv(operations)
        self._packed.clear()  # the buffer is used again
        return in_flight

    def _compute(self, source: Computed, place: tuple[str, Box], tensor: str, target: Tensor) -> None:
        """Writes a computed box of a parameter into a message, once computed for all receivers and this rank."""
        if place in self._local:
            self._compute_local(source, place, tensor)
            target.copy_(self._local[place].view(target.shape))
        elif place in self._packed:
            target.copy_(self._packed[place])
        else:
            source.write(tensor, place[1], target)
            self._packed[place] = target

    def _compute_local(self, source: Computed, place: tuple[str, Box], tensor: str) -> None:
        if place not in self._written:
            source.write(tensor, place[1], self._local[place].view(box_shape(place[1])))
            self._written.add(place)

    def _complete(self, in_flight: _InFlightBucket) -> None:
        begin = time.perf_counter()
        for request in in_flight.requests:
            request.wait()
        arrived = time.perf_counter()
        for message, wire in in_flight.arrivals:
            for _, part, view in _parts(message, self._views(message), wire):
                assert not isinstance(view, Computed), "a box arrives in a target"
                view.copy_(part)
        self._traffic.seconds_waiting += arrived - begin
        self._traffic.seconds_packing += time.perf_counter() - arrived

    def _views(self, message: Message) -> list[Tensor | Computed]:
        """Returns the boxes of a message's segments; forwarded ones are sent from the target."""
        result: list[Tensor | Computed] = []
        for segment, index in zip(message.segments, message.indices, strict=True):
            held = (self._source if message.outgoing and not segment.forwarded else self._target)[segment.parameter]
            result.append(held if isinstance(held, Computed) else held[index])
        return result

    def _buffer(self, slot: int, device: torch.device) -> Tensor:
        """Returns the bytes that the buckets of a slot use in turn, enough for each of them."""
        if slot not in self._buffers:
            # Without the messages that go directly, which the schedule does not know: views of the parameters show it.
            size = max(
                sum(_aligned(m.nbytes) for m in bucket.messages if _direct(m, self._views(m)) is None)
                for bucket in self._schedule.buckets[slot::2]
            )
            self._buffers[slot] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._buffers[slot]

    def _copy(self, copies: Sequence[tuple[Copy, tuple[Index, Index]]]) -> None:
        begin = time.perf_counter()
        for copy, (read, written) in copies:
            if not copy.from_target:
                self._wait_for(copy.source)
            held = (self._target if copy.from_target else self._source)[copy.source]
            if isinstance(held, Computed):
                self._compute_local(held, (copy.source, copy.source_box), copy.tensor)
                continue
            target = self._target[copy.target][written]
            source = held[read].view(target.shape)
            if source.data_ptr() != target.data_ptr():  # an aliased target
                target.copy_(source)
        self._traffic.seconds_packing += time.perf_counter() - begin


def _check_shapes(side: str, shapes: Mapping[str, tuple[int, ...]], tensors: Sources) -> None:
    for name, shape in shapes.items():
        if name not in tensors:
            raise UserError(f"{side}: the parameter {name!r} of the plan is missing. Pass all planned parameters.")
        if tuple(tensors[name].shape) != shape:
            raise UserError(
                f"{side}: {name!r} has shape {tuple(tensors[name].shape)}, but {shape} in the plan. "
                "Plan for these parameters."
            )


def _direct(message: Message, views: Sequence[Tensor | Computed]) -> Tensor | None:
    """Returns the memory of a single segment, as bytes, where it can be sent or received without packing."""
    if len(views) > 1:
        return None
    (segment,), (view,) = message.segments, views
    if isinstance(view, Computed):
        return None
    return view.view(-1).view(torch.uint8) if view.dtype is segment.dtype and view.is_contiguous() else None


def _parts(
    message: Message, views: Sequence[Tensor | Computed], wire: Tensor
) -> Iterator[tuple[Segment, Tensor, Tensor | Computed]]:
    """Yields each segment, its values on the wire, and its box in a parameter, of the same shape."""
    for segment, view, part in zip(message.segments, views, wire.split(list(message.sizes)), strict=True):
        yield segment, part.view(segment.dtype).view(box_shape(segment.parameter_box)), view


def _aligned(nbytes: int) -> int:
    """Returns the next multiple of 16 bytes, where the next message of a buffer starts: a place for any dtype."""
    return -(-nbytes // 16) * 16
