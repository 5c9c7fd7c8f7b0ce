"""Small collectives over the ranks of the job or of a group: JSON and raw tensor bytes, never pickles.

Functions of a `Batch` compute properties of all rows of all ranks, with the same result on every rank.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from errno import EIO
from typing import TYPE_CHECKING, Any

from verl_mg.batch import Batch
from verl_mg.lazy_import import lazy_import

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor
else:
    torch = lazy_import("torch")
    dist = lazy_import("torch.distributed")

LENGTH_BYTES = 8  # size of a length in a message, in bytes: an int64
FIRST_BYTES = 1024 - LENGTH_BYTES
"""Bytes of each rank that are gathered together with its length; most reports have fewer."""
GROUP_TIMEOUT = timedelta(days=7)
"""Timeout of a collective. The watchdog ends a stalled job earlier and names the rank, see `RankWatchdog`."""


def all_gather_bytes(values: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Gathers uint8 tensors (bytes,) of any lengths, in rank order."""
    # Lengths and first bytes in one round. Most reports are short, and need no second round.
    length = torch.tensor([values.numel()]).view(torch.uint8)
    firsts = _all_gather_padded(torch.cat([length, values[:FIRST_BYTES]]), LENGTH_BYTES + FIRST_BYTES, group)
    lengths = [int(first[:LENGTH_BYTES].view(torch.int64)) for first in firsts]
    parts = [first[LENGTH_BYTES:][:n] for first, n in zip(firsts, lengths, strict=True)]
    if (longest := max(lengths)) > FIRST_BYTES:
        rests = _all_gather_padded(values[FIRST_BYTES:], longest - FIRST_BYTES, group)
        parts = [torch.cat([part, rest])[:n] for part, rest, n in zip(parts, rests, lengths, strict=True)]
    return parts


def _all_gather_padded(values: Tensor, length: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Gathers tensors of at most `length` elements, each filled up with zeros."""
    buffers = [torch.empty(length, dtype=values.dtype) for _ in range(dist.get_world_size(group))]
    dist.all_gather(buffers, torch.nn.functional.pad(values, (0, length - values.numel())), group=group)
    return buffers


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gathers JSON values of all ranks, in rank order."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(part.numpy().tobytes()) for part in all_gather_bytes(text, group)]


@contextmanager
def raised_together(*kinds: type[Exception], group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raises the first error of these kinds of any rank on all ranks, after the block, so that none waits for it."""
    error: Exception | None = None
    try:
        yield
    except kinds as failure:
        error = failure
    here = error and [next(i for i, kind in enumerate(kinds) if isinstance(error, kind)), *_arguments(error)]
    for number, *arguments in filter(None, all_gather_json(here, group)):
        raise kinds[number](*arguments) from error


def _arguments(error: Exception) -> list[Any]:
    if isinstance(error, OSError):
        return [error.errno or EIO, error.strerror or str(error), str(error.filename or "")]
    return [str(error)]


def broadcast_bytes(values: bytes) -> bytes:
    """Returns the bytes of rank 0 on every rank of the job, whatever the others pass."""
    length = torch.tensor([len(values)], dtype=torch.int64)
    dist.broadcast(length, src=0)
    buffer = torch.empty(int(length), dtype=torch.uint8)
    if dist.get_rank() == 0 and values:
        buffer = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    if len(buffer):
        dist.broadcast(buffer, src=0)
    return buffer.numpy().tobytes()


def broadcast_json(value: Any = None) -> Any:
    """Returns the JSON value of rank 0 on every rank of the job."""
    return json.loads(broadcast_bytes(json.dumps(value).encode()))


def gather_bytes(values: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Gathers bytes on rank 0 of the job, in rank order; [] on the other ranks."""
    length = torch.tensor([len(values)])
    gathered = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, length, group=group)
    lengths = [int(count) for count in gathered]
    padded = torch.frombuffer(bytearray(values.ljust(max(*lengths, 1), b"\0")), dtype=torch.uint8)
    buffers = [torch.empty_like(padded) for _ in lengths] if dist.get_rank() == 0 else None
    dist.gather(padded, buffers, dst=0, group=group)
    return [buffer[:count].numpy().tobytes() for buffer, count in zip(buffers or [], lengths, strict=False)]


def all_to_all_bytes(outgoing: Sequence[Tensor]) -> list[Tensor]:
    """Sends a uint8 tensor from every rank to every rank of the job."""
    sizes, counts = [part.numel() for part in outgoing], torch.empty(len(outgoing), dtype=torch.int64)
    dist.all_to_all_single(counts, torch.tensor(sizes))
    received = torch.empty(int(counts.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, torch.cat(list(outgoing)), counts.tolist(), sizes)
    return list(received.split(counts.tolist()))


def all_to_all_json(outgoing: Sequence[Any]) -> list[Any]:
    """Sends a JSON value from every rank to every rank of the job."""
    texts = [torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8) for value in outgoing]
    return [json.loads(part.numpy().tobytes()) for part in all_to_all_bytes(texts)]


def request_bytes(num_bytes: int, rank: int, tag: int = 0) -> tuple[Tensor, dist.Work]:
    """Starts the receipt of bytes from another rank: the uint8 tensor for them, and the work to wait for."""
    values = torch.empty(num_bytes, dtype=torch.uint8)
    work = dist.irecv(values, rank, tag=tag)
    assert work is not None
    return values, work


def exchange_bytes(outgoing: Mapping[int, Tensor], sizes: Mapping[int, int]) -> dict[int, Tensor]:
    """Sends uint8 tensors to ranks that know their `sizes`, and returns those received; both by the other rank."""
    requested = {rank: request_bytes(size, rank) for rank, size in sizes.items() if size}
    sends = [dist.isend(values, rank) for rank, values in outgoing.items() if values.numel()]
    for work in [*(work for _, work in requested.values()), *sends]:
        assert work is not None
        work.wait()
    return {rank: values for rank, (values, _) in requested.items()}


class ByteSender:
    """Non-blocking sends of byte tensors to other ranks, with a limit on the bytes in flight."""

    # A receiver requests all that is sent to it before it waits for anything else: otherwise two ranks at their
    # limits could wait for each other. A single tensor may be larger than the limit.

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._in_flight: deque[tuple[Tensor, list[Any]]] = deque()

    def make_free(self, num_bytes: int) -> None:
        """Waits until tensors of so many bytes may be created and sent."""
        while self._in_flight and self._bytes + num_bytes > self._limit:
            values, works = self._in_flight.popleft()
            for work in works:
                work.wait()
            self._bytes -= values.numel()

    def send(self, values: Tensor, ranks: Sequence[int], tag: int = 0) -> None:
        """Starts the sends of a uint8 tensor, which must not be changed; `tag` is of a sequence of messages."""
        if not ranks:
            return
        self.make_free(values.numel())
        works = [dist.isend(values, rank, tag=tag) for rank in ranks]
        self._in_flight.append((values, works))
        self._bytes += values.numel()

    def wait(self) -> None:
        """Waits until all sends are complete."""
        self.make_free(self._limit + 1)


def sum_over_ranks(reports: Sequence[Mapping[str, Any]], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Sums scalars by name over the reports of all ranks; a missing name counts as 0."""
    return sum_by_name(all_gather_json(sum_by_name(reports), group))


def sum_by_name(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sums scalars by name; a missing name counts as 0."""
    names = dict.fromkeys(name for report in reports for name in report)
    return {name: sum(float(report.get(name, 0.0)) for report in reports) for name in names}


def all_reduce_sum(values: Tensor | Sequence[float | Tensor]) -> Tensor:
    """Returns the sums over all ranks of some numbers, in float64, bitwise identical on every rank."""
    values = torch.as_tensor(values)
    # Gathered and summed in rank order, whatever the algorithm of an all-reduce would be.
    gathered = _gather(values.detach().double().cpu())
    return gathered.view(-1, *values.shape).sum(0)


def all_gather_column(batch: Batch, name: str) -> Tensor:
    """Gathers a column with one entry for each row, in the order of the sample ids of all ranks."""
    # A rank without rows may have the column with another data type, or not at all.
    order = _gather(batch["sample_id"]).argsort()
    values = batch[name]
    return _gather(values if values.dtype == torch.int64 else values.double())[order].to(values.dtype)


def global_kth_largest(values: Tensor, k: int) -> float:
    """Returns the k-th largest (k from 1) of the values (m,) of all ranks; the smallest of fewer, infinity of none."""
    # No rank has more than k of the k largest.
    gathered = _gather(values.detach().double().topk(min(k, len(values))).values)
    if not len(gathered):
        return float("inf")
    return float(gathered.topk(min(k, len(gathered))).values[-1])


def reassign_sample_ids(batch: Batch) -> Batch:
    """Replaces the sample ids by 0, 1, ... over all ranks, ids of trajectories too, and returns the batch.

    The order of the ids is preserved. Duplicates of a row become distinct; duplicates of all rows of a trajectory
    become distinct trajectories, each with the id of its first row.
    """
    counts = _gather(torch.tensor([len(batch)]))
    first = int(counts[: dist.get_rank()].sum())
    before = batch["sample_id"]
    order = _gather(before).argsort(stable=True)
    batch["sample_id"] = order.argsort()[first : first + len(batch)]
    if "trajectory" in batch:
        _reassign_trajectories(batch, before.tolist())
    return batch


def _reassign_trajectories(batch: Batch, before: Sequence[int]) -> None:
    """Replaces the columns that name rows by their sample ids, which were `before`."""
    ids, trajectories = batch["sample_id"].tolist(), batch["trajectory"].tolist()
    seen: Counter[int] = Counter()
    copies = []
    for row in before:
        copies.append(seen[row])
        seen[row] += 1
    id_of = dict(zip(zip(before, copies, strict=True), ids, strict=True))
    first: dict[tuple[int, int], int] = {}
    for key, row in zip(zip(trajectories, copies, strict=True), ids, strict=True):
        first[key] = min(row, first.get(key, row))
    batch["trajectory"] = torch.tensor([first[key] for key in zip(trajectories, copies, strict=True)]).long()
    if "prefix_of" in batch:
        # Of the same copy; a row whose prefix was not selected has none.
        prefixes = [id_of.get(key) for key in zip(batch["prefix_of"].tolist(), copies, strict=True)]
        batch["prefix_of"] = torch.tensor([i if p is None else p for i, p in zip(ids, prefixes, strict=True)]).long()
        kept = torch.tensor([prefix is not None for prefix in prefixes], dtype=torch.bool)
        batch["prefix_length"] = torch.where(kept, batch["prefix_length"], 0)


def _gather(values: Tensor) -> Tensor:
    """Gathers the entries of a data type of 8 bytes, in rank order."""
    parts = all_gather_bytes(values.cpu().contiguous().reshape(-1).view(torch.uint8))
    return torch.cat([part.clone().view(values.dtype) for part in parts])


def new_group(ranks: Sequence[int] | None, backend: str) -> dist.ProcessGroup:
    """Creates a process group for one purpose; a collective of all ranks of the job. "nccl" is for GPUs only."""
    group: Any = dist.new_group(ranks, GROUP_TIMEOUT, backend)
    return group


class ProcessGroups:
    """The process groups of a job on this rank; all ranks of the job request the same groups in the same order.

    A request for ranks that have a group of the backend already returns that group. Collectives of two uses of a group
    run one after the other, and all ranks of a group start them in the same order.
    """

    # torch names a group by the number of calls so far, so all ranks make all calls, also for groups without them. Sets
    # that several kinds of group share are made once, for a large layout has thousands of such calls.
    def __init__(self) -> None:
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup | None] = {}

    def of(self, ranks: Sequence[int], backend: str) -> dist.ProcessGroup | None:
        """Returns the group of some ranks, None outside of it; a collective of all ranks of the job."""
        # Sorted, because torch numbers the members of a group in rising order whatever their order here.
        key = (tuple(sorted(ranks)), backend)
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD  # has both backends
        if key not in self._groups:
            group = new_group(key[0], backend)
            self._groups[key] = group if dist.get_rank() in ranks else None
        return self._groups[key]
