"""Small messages between ranks, all of the job unless a group is named: JSON and raw tensor bytes, never pickles."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_bytes(own: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Every rank's uint8 tensor, of any length, in rank order. One round for the lengths, one for the bytes."""
    length = torch.tensor([own.numel()], dtype=torch.int64)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    longest = max(int(n) for n in lengths)
    room = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(room, torch.nn.functional.pad(own, (0, longest - own.numel())), group=group)
    return [buffer[: int(n)] for buffer, n in zip(room, lengths, strict=True)]


def all_gather_json(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's JSON value, in rank order."""
    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    return [json.loads(part.numpy().tobytes()) for part in all_gather_bytes(text, group)]


def all_to_all_bytes(outgoing: Sequence[Tensor], incoming_sizes: Sequence[int]) -> list[Tensor]:
    """Send `outgoing[r]` (uint8) to rank r; receive `incoming_sizes[r]` bytes from rank r."""
    received = torch.empty(sum(incoming_sizes), dtype=torch.uint8)
    sizes = [part.numel() for part in outgoing]
    dist.all_to_all_single(received, torch.cat(list(outgoing)), list(incoming_sizes), sizes)
    return list(received.split(list(incoming_sizes)))


def sum_over_ranks(reports: Sequence[Mapping[str, Any]], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Add up scalars by name over the reports of all ranks; a name that a report lacks counts as 0 there."""
    return _added(all_gather_json(_added(reports), group))


def _added(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for report in reports for name in report)
    return {name: sum(float(report.get(name, 0.0)) for report in reports) for name in names}
