"""Carrying out a schedule over a process group: two buckets in flight, packed while the one before is sent."""

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
from verl_mg.sharding.boxes import box_shape, slices

Tensors = Mapping[str, Tensor]


@dataclass
class Traffic:
    """What one execution moved on this rank, counted where it happened."""

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    seconds_packing: float = 0.0
    seconds_waiting: float = 0.0


@dataclass
class _InFlightBucket:
    """A bucket on its way: what to wait for, and which messages to unpack from where."""

    requests: list[dist.Work]
    arrivals: list[tuple[Message, Tensor]] = field(default_factory=list)


def execute(schedule: Schedule, source: Tensors, target: Tensors, group: dist.ProcessGroup | None = None) -> Traffic:
    """Fill `target` in place from the `source` tensors of all ranks; every rank of the plan calls it at once.

    Values are cast to the schedule's dtype before they are sent; targets of another dtype are cast again on arrival.
    A target that shares the storage of its source is left as it is. Beyond the tensors themselves two buffers of the
    bucket size are allocated. On CUDA everything is ordered behind the current stream's work on the sources, and the
    targets are whole when the call returns.
    Raises UserError, before anything is written, for a parameter that is missing or not of the planned shape.
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
        """See `execute`."""
        begin = time.perf_counter()
        flight: _InFlightBucket | None = None
        for number, bucket in enumerate(self._schedule.buckets):
            if bucket.waits_for_previous and flight:
                self._land(flight)
                flight = None
            ahead, flight = flight, self._launch(bucket, number % 2)
            if number == 0:
                self._copy(of_target=False)
            if ahead:
                self._land(ahead)
        if flight:
            self._land(flight)
        else:
            self._copy(of_target=False)
        self._copy(of_target=True)
        for device in {tensor.device for tensor in self._target.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._traffic.seconds = time.perf_counter() - begin
        return self._traffic

    def _launch(self, bucket: Bucket, slot: int) -> _InFlightBucket:
        begin = time.perf_counter()
        flight, offset = _InFlightBucket([]), 0
        operations = []
        for message in bucket.messages:
            tensors = self._tensors(message)
            wire = _direct(message, tensors)
            if wire is None:
                wire = self._buffer(slot, message)[offset : offset + message.nbytes].view(message.dtype)
                offset += aligned(message.nbytes)
                if message.outgoing:
                    _pack(message.parts, tensors, wire)
                else:
                    flight.arrivals.append((message, wire))
            operations.append(
                dist.P2POp(dist.isend if message.outgoing else dist.irecv, wire, message.peer, self._group)
            )
            if message.outgoing:
                self._traffic.bytes_sent += wire.nbytes
            else:
                self._traffic.bytes_received += wire.nbytes
        self._traffic.seconds_packing += time.perf_counter() - begin
        flight.requests = dist.batch_isend_irecv(operations)
        return flight

    def _land(self, flight: _InFlightBucket) -> None:
        begin = time.perf_counter()
        for request in flight.requests:
            request.wait()
        arrived = time.perf_counter()
        for message, wire in flight.arrivals:
            _unpack(message.parts, self._target, wire)
        self._traffic.seconds_waiting += arrived - begin
        self._traffic.seconds_packing += time.perf_counter() - arrived

    def _tensors(self, message: Message) -> Tensors:
        """Where the parts of a message lie: what is passed on comes out of the target."""
        return self._source if message.outgoing and not message.forwarded else self._target

    def _buffer(self, slot: int, message: Message) -> Tensor:
        """The bytes that the buckets of a slot use in turn, enough for each of them."""
        if slot not in self._buffers:
            size = max(
                sum(aligned(m.nbytes) for m in bucket.messages if _direct(m, self._tensors(m)) is None)
                for bucket in self._schedule.buckets[slot::2]
            )
            device = self._tensors(message)[message.parts[0].parameter].device
            self._buffers[slot] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._buffers[slot]

    def _copy(self, of_target: bool) -> None:
        begin = time.perf_counter()
        for copy in self._schedule.copies:
            if copy.of_target == of_target:
                _copy_box(copy, self._target if of_target else self._source, self._target)
        self._traffic.seconds_packing += time.perf_counter() - begin


def _check_shapes(side: str, shapes: Mapping[str, tuple[int, ...]], tensors: Tensors) -> None:
    for name, shape in shapes.items():
        if name not in tensors:
            raise UserError(f"{side}: the parameter {name!r} of the plan is missing")
        if tuple(tensors[name].shape) != shape:
            raise UserError(f"{side}: {name!r} has shape {tuple(tensors[name].shape)}, the plan says {shape}")


def _direct(message: Message, tensors: Tensors) -> Tensor | None:
    """The part's own memory, where it can go to the wire or come from it as it is."""
    if len(message.parts) > 1:
        return None
    (part,) = message.parts
    view = _view(tensors, part.parameter, part.at)
    return view if view.dtype is message.dtype and view.is_contiguous() else None


def _copy_box(copy: Copy, source: Tensors, target: Tensors) -> None:
    there = _view(target, copy.target, copy.target_at)
    here = _view(source, copy.source, copy.source_at).view(there.shape)
    if here.data_ptr() != there.data_ptr():
        there.copy_(here)


def _pack(parts: tuple[Segment, ...], tensors: Tensors, wire: Tensor) -> None:
    for part, room in zip(parts, wire.split([part.elements for part in parts]), strict=True):
        room.view(box_shape(part.at)).copy_(_view(tensors, part.parameter, part.at))


def _unpack(parts: tuple[Segment, ...], tensors: Tensors, wire: Tensor) -> None:
    for part, values in zip(parts, wire.split([part.elements for part in parts]), strict=True):
        _view(tensors, part.parameter, part.at).copy_(values.view(box_shape(part.at)))


def _view(tensors: Tensors, parameter: str, at: tuple[tuple[int, int], ...]) -> Tensor:
    return tensors[parameter][slices(at)]
