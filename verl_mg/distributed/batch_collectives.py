"""Numbers of all rows of a batch, wherever they lie: what every rank needs to know to decide the same."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.distributed.collectives import all_gather_bytes


def all_reduce_sum(values: Tensor) -> Tensor:
    """The sum over all ranks of a small tensor of one shape, in float64, the same to the bit on every rank."""
    gathered = _gather(values.detach().double().cpu())
    return gathered.view(-1, *values.shape).sum(0)


def all_gather_column(batch: Batch, name: str) -> Tensor:
    """A sequence column of all rows of all ranks, in the order of their sample ids."""
    # A rank without rows may know another type, or none, of a column.
    order = _gather(batch["sample_id"]).argsort()
    values = batch[name]
    return _gather(values if values.dtype == torch.int64 else values.double())[order].to(values.dtype)


def global_kth_largest(values: Tensor, k: int) -> float:
    """Of the values (m,) of all ranks the k-th largest, counted from 1; the smallest where there are fewer than k."""
    own = values.detach().double().topk(min(k, len(values))).values
    gathered = _gather(own)
    if not len(gathered):
        return float("inf")
    return float(gathered.topk(min(k, len(gathered))).values[-1])


def reassign_sample_ids(batch: Batch) -> Batch:
    """The same rows with the sample ids 0, 1, ... over all ranks, in the order of their ids of before, wherever they
    lie: a row that is there twice becomes two."""
    counts = _gather(torch.tensor([len(batch)]))
    first = int(counts[: dist.get_rank()].sum())
    order = _gather(batch["sample_id"]).argsort(stable=True)
    batch["sample_id"] = order.argsort()[first : first + len(batch)]
    return batch


def _gather(own: Tensor) -> Tensor:
    """All ranks' entries of a type of 8 bytes, in rank order."""
    parts = all_gather_bytes(own.cpu().contiguous().reshape(-1).view(torch.uint8))
    return torch.cat([part.clone().view(own.dtype) for part in parts])
