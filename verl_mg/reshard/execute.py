"""Carrying out a plan over a process group, bucket by bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.reshard.plan import Move, Plan
from verl_mg.weights.boxes import extents, slices

BUCKET_ELEMENTS = 64 * 2**20


@dataclass(frozen=True)
class Traffic:
    """What one execution moved on this rank, counted where it happened."""

    bytes_sent: int
    bytes_received: int


def execute(
    plan: Plan,
    rank: int,
    source: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    dtype: torch.dtype,
    bucket_elements: int = BUCKET_ELEMENTS,
) -> Traffic:
    """Fill `target` in place from the `source` tensors of all ranks; every rank of the default group calls it.

    Values are cast to `dtype` (that of the targets) before they are sent. At most one bucket of
    `bucket_elements`, or a single larger box, is in flight in each direction.
    """
    sent = received = 0
    for bucket in _buckets(plan, bucket_elements):
        for move in bucket:
            if move.local and move.target_rank == rank:
                target[move.target].detach()[slices(move.target_box)] = source[move.source].detach()[
                    slices(move.source_box)
                ].to(dtype)
        outgoing: dict[int, list[Move]] = defaultdict(list)
        incoming: dict[int, list[Move]] = defaultdict(list)
        for move in bucket:
            if move.local:
                continue
            if move.source_rank == rank:
                outgoing[move.target_rank].append(move)
            if move.target_rank == rank:
                incoming[move.source_rank].append(move)
        some = next(iter(source.values()), None)
        device = some.device if some is not None else next(iter(target.values())).device
        sends = {
            peer: torch.cat([source[m.source].detach()[slices(m.source_box)].to(dtype).reshape(-1) for m in moves])
            for peer, moves in outgoing.items()
        }
        receives = {
            peer: torch.empty(sum(m.elements for m in moves), dtype=dtype, device=device)
            for peer, moves in incoming.items()
        }
        _exchange(sends, receives)
        for peer, moves in incoming.items():
            parts = receives[peer].split([m.elements for m in moves])
            for move, part in zip(moves, parts, strict=True):
                target[move.target].detach()[slices(move.target_box)] = part.view(extents(move.target_box))
        sent += sum(buffer.nbytes for buffer in sends.values())
        received += sum(buffer.nbytes for buffer in receives.values())
    return Traffic(sent, received)


def _buckets(plan: Plan, limit: int) -> Iterator[list[Move]]:
    """Runs of moves in which no rank sends or receives more than `limit` elements, unless one move alone does."""
    bucket: list[Move] = []
    load: dict[tuple[int, bool], int] = {}
    for move in plan.moves:
        ends = [] if move.local else [(move.source_rank, True), (move.target_rank, False)]
        if any(load.get(end, 0) and load[end] + move.elements > limit for end in ends):
            yield bucket
            bucket, load = [], {}
        bucket.append(move)
        for end in ends:
            load[end] = load.get(end, 0) + move.elements
    if bucket:
        yield bucket


def _exchange(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
    operations = [dist.P2POp(dist.isend, buffer, peer) for peer, buffer in sends.items()]
    operations += [dist.P2POp(dist.irecv, buffer, peer) for peer, buffer in receives.items()]
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()
