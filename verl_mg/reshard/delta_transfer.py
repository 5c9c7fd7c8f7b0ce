"""Transfer of the elements that have changed since the last transfer, along the messages of a schedule.

A message consists of the codes (`delta.py`) of its boxes, whose sizes are sent first. What arrives are patches of the
target's parameters; applying them is left to whoever has these: a rank, or an engine in another process. The sender
keeps a copy of the parameters that it has sent, in host memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.reshard.delta import HEADER_BYTES, Patch, apply_delta, encode_delta
from verl_mg.reshard.execute import Computed, Sources, Traffic
from verl_mg.reshard.schedule import Bucket, Message, Schedule, Segment
from verl_mg.sharding.boxes import Box, intersect, slices, translate_box

Tensors = Mapping[str, Tensor]


class SentValues:
    """Copies of the boxes of the source as they were sent last, in host memory."""

    # Copies, and not the bits that the last update has changed: XOR would need the values before it too.

    def __init__(self) -> None:
        self._copies: dict[tuple[str, Box], Tensor] = {}

    def encode(self, parameter: str, box: Box, values: Tensor) -> Tensor:
        """Returns the changes of a box since it was kept, all of its elements where it was not, and keeps it."""
        if (parameter, box) in self._copies:
            return encode_delta(values, self._copies[parameter, box])
        self.keep(parameter, box, values)
        return encode_delta(values, None)

    def keep(self, parameter: str, box: Box, values: Tensor) -> None:
        """Copies a box of a parameter."""
        if (parameter, box) not in self._copies:
            self._copies[parameter, box] = device.host_buffer(values)
        self._copies[parameter, box].copy_(values)

    def keep_all(self, schedule: Schedule, source: Sources) -> None:
        """Copies the boxes that a schedule sends, or copies within the rank."""
        boxes = {
            (segment.parameter, segment.parameter_box): segment.tensor
            for segment in schedule.segments(outgoing=True)
            if not segment.forwarded
        }
        boxes |= {(copy.source, copy.source_box): copy.tensor for copy in schedule.copies if not copy.from_target}
        for (parameter, box), tensor in boxes.items():
            self.keep(parameter, box, values_of(source, parameter, tensor, box))


def values_of(source: Sources, parameter: str, tensor: str, box: Box) -> Tensor:
    """Returns the elements of a tensor in a box of a parameter of the source."""
    held = source[parameter]
    return held.values(tensor, box) if isinstance(held, Computed) else held.detach()[slices(box)]


def transfer_changes(
    schedule: Schedule,
    source: Sources,
    sent: SentValues,
    group: dist.ProcessGroup | None = None,
    wait_for: Callable[[str], object] | None = None,
    here: torch.device | None = None,
) -> tuple[list[Patch], Traffic]:
    """Sends what has changed in the source; every rank of the plan must call it.

    Source parameters have the dtypes of the wire. The patches of this rank cover all boxes of its target. `here` is the
    device of codes and messages.
    """
    begin = time.perf_counter()
    transfer = _Transfer(schedule, source, sent, group, wait_for or (lambda _: None), here or device.current_device())
    for bucket in schedule.buckets:
        transfer.run(bucket)
    for copy in schedule.copies:
        if not copy.from_target:
            code = transfer.encoded(copy.source, copy.source_box, copy.tensor)
            transfer.patches[copy.target, copy.target_box] = code
    # A box that the rank needs twice arrived once, perhaps in parts: each part is a patch of the second place too.
    for copy in schedule.copies:
        if copy.from_target:
            for (parameter, box), code in list(transfer.patches.items()):
                if parameter == copy.source and intersect(box, copy.source_box) == box:
                    at = translate_box(box, copy.source_box, copy.target_box)
                    transfer.patches[copy.target, at] = code
    transfer.traffic.seconds = time.perf_counter() - begin
    return [Patch(*place, code) for place, code in transfer.patches.items()], transfer.traffic


def apply_patches(patches: Iterable[Patch], target: Tensors) -> bool:
    """Writes patches into parameters with the values of the transfer before; returns whether all checksums are equal.

    If not, all elements have to be transferred.
    """
    results = [apply_delta(patch.code, target[patch.parameter].detach()[slices(patch.box)]) for patch in patches]
    return all(results)


class _Transfer:
    def __init__(
        self,
        schedule: Schedule,
        source: Sources,
        sent: SentValues,
        group: dist.ProcessGroup | None,
        wait_for: Callable[[str], object],
        here: torch.device,
    ) -> None:
        self._source, self._sent, self._group, self._wait_for = source, sent, group, wait_for
        self._codes: dict[tuple[str, Box], Tensor] = {}
        # The epoch in which a box is sent the last time: its code is released then, unless this rank needs it itself.
        self._last: dict[tuple[str, Box], float] = {
            (segment.parameter, segment.parameter_box): bucket.epoch
            for bucket in schedule.buckets
            for message in bucket.messages
            if message.outgoing
            for segment in message.segments
        }
        self._last |= {(c.source, c.source_box): math.inf for c in schedule.copies if not c.from_target}
        self._device = here
        self.patches: dict[tuple[str, Box], Tensor] = {}
        self.traffic = Traffic()

    def encoded(self, parameter: str, box: Box, tensor: str) -> Tensor:
        """Returns the changes of a box of the source, which is encoded once for all its receivers."""
        if (parameter, box) not in self._codes:
            begin = time.perf_counter()
            self._wait_for(parameter)
            values = values_of(self._source, parameter, tensor, box)
            self._codes[parameter, box] = self._sent.encode(parameter, box, values).to(self._device)
            self.traffic.seconds_packing += time.perf_counter() - begin
        return self._codes[parameter, box]

    def run(self, bucket: Bucket) -> None:
        """Exchanges sizes, then codes: in each of the two, the messages of all ranks match."""
        # Sizes first: an upper bound of them would send empty bytes. One bucket after the other: most of the time is in
        # comparing and in checksums.
        codes = {id(m): [self._code(segment) for segment in m.segments] for m in bucket.messages if m.outgoing}
        sizes = {
            id(m): torch.tensor([len(code) for code in codes[id(m)]], dtype=torch.int64).to(self._device)
            if m.outgoing
            else torch.empty(len(m.segments), dtype=torch.int64, device=self._device)
            for m in bucket.messages
        }
        self._exchange(bucket, sizes)
        contents = {
            id(m): torch.cat(codes[id(m)])
            if m.outgoing
            else torch.empty(int(sizes[id(m)].sum()), dtype=torch.uint8, device=self._device)
            for m in bucket.messages
        }
        del codes
        self._codes = {place: code for place, code in self._codes.items() if self._last[place] > bucket.epoch}
        self._exchange(bucket, contents)
        for message in bucket.messages:
            if not message.outgoing:
                self._unpack(message, contents[id(message)].split(sizes[id(message)].tolist()))

    def _code(self, segment: Segment) -> Tensor:
        place = segment.parameter, segment.parameter_box
        return self.patches[place] if segment.forwarded else self.encoded(*place, segment.tensor)

    def _exchange(self, bucket: Bucket, tensors: Mapping[int, Tensor]) -> None:
        begin = time.perf_counter()
        operations = [
            dist.P2POp(dist.isend if m.outgoing else dist.irecv, tensors[id(m)], m.peer, self._group)
            for m in bucket.messages
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        for message in bucket.messages:
            if message.outgoing:
                self.traffic.bytes_sent += tensors[id(message)].nbytes
            else:
                self.traffic.bytes_received += tensors[id(message)].nbytes
        self.traffic.seconds_waiting += time.perf_counter() - begin

    def _unpack(self, message: Message, codes: Iterable[Tensor]) -> None:
        for segment, code in zip(message.segments, codes, strict=True):
            assert len(code) >= HEADER_BYTES, "a code has a header"
            self.patches[segment.parameter, segment.parameter_box] = code
