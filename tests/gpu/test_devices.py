"""Ranks and their devices: the first use of NCCL, on which all other tests of several ranks depend."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.rank_pool import RankError
from verl_mg import device


def met() -> tuple[str, float]:
    """Kind of this rank's device, and the sum of all ranks on it."""
    total = torch.full((2**20,), float(dist.get_rank()), device=device.current_device())
    dist.all_reduce(total)
    return total.device.type, total.max().item()


def test_ranks_meet_on_their_devices(ranks, machine):
    """Where ranks cannot share a GPU after all, tests of more ranks than GPUs are skipped from here on."""
    kind, count = "cuda" if machine.gpus else "cpu", machine.ranks
    try:
        assert ranks.run(count, met) == [(kind, count * (count - 1) / 2)] * count
    except RankError:
        if machine.shares_gpus:
            ranks.size, ranks.why_no_more = machine.gpus, "ranks did not meet on a shared GPU, see test_devices.py"
        raise


@pytest.mark.usefixtures("on_gpu")
def test_each_gpu_meets_the_others_without_sharing(ranks, machine):
    count = min(machine.gpus, machine.ranks)
    assert ranks.run(count, met) == [("cuda", count * (count - 1) / 2)] * count
