"""Execution of a schedule over a process group.

- Two buckets are in flight: one is packed while the previous one is sent.
- Additional memory is two buffers of the bucket size, whatever the size of the model.
- A box that is contiguous in memory and needs no cast is sent from its parameter, or received into it, directly.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.errors import UserError
from verl_mg.reshard.plan import Copy
from verl_mg.reshard.schedule import Bucket, Message, Schedule, Segment, aligned
from verl_mg.sharding.boxes import Box, box_shape, slices

Tensors = Mapping[str, Tensor]


@dataclass
class Traffic:
    """Counters of one execution on this rank."""

    bytes_sent: int = 0
    """Bytes sent over the wire."""
    bytes_received: int = 0
    """Bytes received over the wire."""
    seconds: float = 0.0
    """Duration of the whole execution."""
    seconds_packing: float = 0.0
    """Part of `seconds` for packing, unpacking and copying within the rank."""
    seconds_waiting: float = 0.0
    """Part of `seconds` for waiting for messages."""


@dataclass
class _InFlightBucket:
    """Pending requests of a bucket, and the messages to unpack when they are complete."""

    requests: list[dist.Work]
    arrivals: list[tuple[Message, Tensor]] = field(default_factory=list)


def execute(schedule: Schedule, source: Tensors, target: Tensors, group: dist.ProcessGroup | None = None) -> Traffic:
    """Fills the target parameters in place; every rank of the plan must call it.

    Values are cast to the schedule's dtype before they are sent, and again on arrival where the target has another
    dtype. A target that shares the storage of its source is left unchanged. On CUDA everything is ordered behind the
    current stream's work on the sources, and the targets are complete when the call returns.

    Args:
        schedule: schedule of this rank.
        source: this rank's source parameters, in the planned shapes.
        target: this rank's target parameters, in the planned shapes.
        group: process group of all ranks; None for the default group.

    Returns:
        Bytes and seconds of this rank.

    Raises:
        UserError: a parameter is missing or not of the planned shape; nothing has been written then.
    """
    _check_shapes("source", schedule.source_shapes, source)
    _check_shapes("target", schedule.target_shapes, target)
    return _Execution(schedule, source, target, group).run()


class _Execution:
    def __init__(self, schedule: Schedule, source: Tensors, target: Tensors, group: dist.ProcessGroup | None) -> None:
        self._schedule, self._group = schedule, group
        self._source = {name: tensor.detach() for name, tensor in source.items()}
        self._target = {name: tensor.detach() for name, tensor in target.items()}
        self._traffic = Traffic()
        self._buffers: dict[int, Tensor] = {}

    def run(self) -> Traffic:
        begin = time.perf_counter()
        in_flight: _InFlightBucket | None = None
        for number, bucket in enumerate(self._schedule.buckets):
            if bucket.waits_for_previous and in_flight:
                self._complete(in_flight)
                in_flight = None
            previous, in_flight = in_flight, self._launch(bucket, number % 2)
            if number == 0:
                self._copy(from_target=False)
            if previous:
                self._complete(previous)
        if in_flight:
            self._complete(in_flight)
        else:
            self._copy(from_target=False)
        self._copy(from_target=True)
        for device in {tensor.device for tensor in self._target.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._traffic.seconds = time.perf_counter() - begin
        return self._traffic

    def _launch(self, bucket: Bucket, slot: int) -> _InFlightBucket:
        begin = time.perf_counter()
        in_flight, offset = _InFlightBucket([]), 0
        operations = []
        for message in bucket.messages:
            tensors = self._tensors(message)
            wire = _direct(message, tensors)
            if wire is None:
                wire = self._buffer(slot, message)[offset : offset + message.nbytes].view(message.dtype)
                offset += aligned(message.nbytes)
                if message.outgoing:
                    _pack(message.segments, tensors, wire)
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
        return in_flight

    def _complete(self, in_flight: _InFlightBucket) -> None:
        begin = time.perf_counter()
        for request in in_flight.requests:
            request.wait()
        arrived = time.perf_counter()
        for message, wire in in_flight.arrivals:
            _unpack(message.segments, self._target, wire)
        self._traffic.seconds_waiting += arrived - begin
        self._traffic.seconds_packing += time.perf_counter() - arrived

    def _tensors(self, message: Message) -> Tensors:
        """Returns the parameters of a message's segments: forwarded boxes are sent from the target."""
        return self._source if message.outgoing and not message.forwarded else self._target

    def _buffer(self, slot: int, message: Message) -> Tensor:
        """Returns the bytes that the buckets of a slot use in turn, enough for each of them."""
        if slot not in self._buffers:
            size = max(
                sum(aligned(m.nbytes) for m in bucket.messages if _direct(m, self._tensors(m)) is None)
                for bucket in self._schedule.buckets[slot::2]
            )
            device = self._tensors(message)[message.segments[0].parameter].device
            self._buffers[slot] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._buffers[slot]

    def _copy(self, from_target: bool) -> None:
        begin = time.perf_counter()
        for copy in self._schedule.copies:
            if copy.from_target == from_target:
                _copy_box(copy, self._target if from_target else self._source, self._target)
        self._traffic.seconds_packing += time.perf_counter() - begin


def _check_shapes(side: str, shapes: Mapping[str, tuple[int, ...]], tensors: Tensors) -> None:
    for name, shape in shapes.items():
        if name not in tensors:
            raise UserError(f"{side}: the parameter {name!r} of the plan is missing. Pass all planned parameters.")
        if tuple(tensors[name].shape) != shape:
            raise UserError(
                f"{side}: {name!r} has shape {tuple(tensors[name].shape)}, but {shape} in the plan. "
                "Plan for these parameters."
            )


def _direct(message: Message, tensors: Tensors) -> Tensor | None:
    """Returns the memory of a single segment where it can be sent or received without packing."""
    if len(message.segments) > 1:
        return None
    (segment,) = message.segments
    view = _view(tensors, segment.parameter, segment.parameter_box)
    return view if view.dtype is message.dtype and view.is_contiguous() else None


def _copy_box(copy: Copy, source: Tensors, target: Tensors) -> None:
    dst = _view(target, copy.target, copy.target_box)
    src = _view(source, copy.source, copy.source_box).view(dst.shape)
    if src.data_ptr() != dst.data_ptr():
        dst.copy_(src)


def _pack(segments: tuple[Segment, ...], tensors: Tensors, wire: Tensor) -> None:
    for segment, dst in zip(segments, wire.split([segment.num_elements for segment in segments]), strict=True):
        dst.view(box_shape(segment.parameter_box)).copy_(_view(tensors, segment.parameter, segment.parameter_box))


def _unpack(segments: tuple[Segment, ...], tensors: Tensors, wire: Tensor) -> None:
    for segment, values in zip(segments, wire.split([segment.num_elements for segment in segments]), strict=True):
        dst = _view(tensors, segment.parameter, segment.parameter_box)
        dst.copy_(values.view(box_shape(segment.parameter_box)))


def _view(tensors: Tensors, parameter: str, box: Box) -> Tensor:
    return tensors[parameter][slices(box)]
