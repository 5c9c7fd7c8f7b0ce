"""Schedules as text, for ranks outside the job that have no tables: compressed JSON, which is data and never code.

Boxes are lists of [begin, end); a message is [peer, outgoing, segments], and a segment is a list of its fields.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch

from verl_mg.reshard.plan import Copy
from verl_mg.reshard.schedule import Bucket, Message, Schedule, Segment
from verl_mg.sharding.boxes import Box

FORMAT = 1  # number of the format; it changes with the fields
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32)
}
"""Dtypes in which weights travel, by their names in the text."""


def pack_schedules(schedules: Sequence[Schedule]) -> bytes:
    """Returns the schedules of one rank as compressed text."""
    document = {"format": FORMAT, "schedules": [_schedule_fields(schedule) for schedule in schedules]}
    return zlib.compress(json.dumps(document).encode())


def unpack_schedules(text: bytes) -> list[Schedule]:
    """Reads the result of `pack_schedules`; ValueError for another format, and for a dtype in which nothing travels."""
    document = json.loads(zlib.decompress(text))
    if document["format"] != FORMAT:
        raise ValueError(f"schedules have format {document['format']}, this version of verl_mg reads {FORMAT}")
    return [_schedule(fields) for fields in document["schedules"]]


def _schedule_fields(schedule: Schedule) -> dict[str, Any]:
    return {
        "rank": schedule.rank,
        "source_shapes": dict(schedule.source_shapes),
        "target_shapes": dict(schedule.target_shapes),
        "copies": [astuple(copy) for copy in schedule.copies],
        "buckets": [
            [bucket.epoch, [[m.peer, m.outgoing, [_segment_fields(s) for s in m.segments]] for m in bucket.messages]]
            for bucket in schedule.buckets
        ],
    }


def _segment_fields(segment: Segment) -> list[Any]:
    dtype = str(segment.dtype).removeprefix("torch.")
    return [segment.tensor, segment.box, segment.parameter, segment.parameter_box, dtype, segment.forwarded]


def _schedule(fields: dict[str, Any]) -> Schedule:
    return Schedule(
        fields["rank"],
        {name: tuple(shape) for name, shape in fields["source_shapes"].items()},
        {name: tuple(shape) for name, shape in fields["target_shapes"].items()},
        tuple(
            Copy(tensor, source, _box(source_box), target, _box(target_box), from_target)
            for tensor, source, source_box, target, target_box, from_target in fields["copies"]
        ),
        tuple(
            Bucket(epoch, tuple(Message(peer, outgoing, tuple(map(_segment, parts))) for peer, outgoing, parts in sent))
            for epoch, sent in fields["buckets"]
        ),
    )


def _segment(fields: Sequence[Any]) -> Segment:
    tensor, box, parameter, parameter_box, dtype, forwarded = fields
    if dtype not in DTYPES:
        raise ValueError(f"{tensor} would travel as {dtype}, this version of verl_mg reads {', '.join(DTYPES)}")
    return Segment(tensor, _box(box), parameter, _box(parameter_box), DTYPES[dtype], forwarded)


def _box(pairs: Sequence[Sequence[int]]) -> Box:
    return tuple((begin, end) for begin, end in pairs)
