"""Ranks and their devices: the first use of NCCL, on which all other tests of several ranks depend."""

import pytest
import torch
import torch.distributed as dist

from verl_mg import device


def met() -> tuple[str, float]:
    """Kind of this rank's device, and the sum of all ranks on it."""
    total = torch.full((2**20,), float(dist.get_rank()), device=device.current_device())
    dist.all_reduce(total)
    return total.device.type, total.max().item()


def test_ranks_meet_on_their_devices(ranks, machine):
    kind, count = "cuda" if machine.gpus else "cpu", machine.ranks
    assert ranks.run(count, met) == [(kind, count * (count - 1) / 2)] * count


@pytest.mark.needs(gpu=True)
def test_each_gpu_meets_the_others_without_sharing(ranks, machine):
    count = min(machine.gpus, machine.ranks)
    assert ranks.run(count, met) == [("cuda", count * (count - 1) / 2)] * count
