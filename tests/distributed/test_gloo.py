"""The event loop that all gloo groups of a process share, on real groups."""

import os
from pathlib import Path

import torch
import torch.distributed as dist


def threads_named(name):
    return sum((task / "comm").read_text().strip() == name for task in Path(f"/proc/{os.getpid()}/task").iterdir())


def sums_over_groups(groups):
    """Adds rank + 1 in new groups of all ranks, and returns the sums and this process's gloo event loops."""
    created = [dist.new_group(backend="gloo") for _ in range(groups)]
    numbers = [torch.tensor(float(dist.get_rank() + 1)) for _ in created]
    pending = [
        dist.all_reduce(number, group=group, async_op=True) for number, group in zip(numbers, created, strict=True)
    ]
    for work in pending:
        work.wait()
    return [number.item() for number in numbers], threads_named("gloo_tcp_loop")


def test_groups_of_a_process_share_one_event_loop(ranks):
    assert ranks.run(3, sums_over_groups, 12) == [([6.0] * 12, 1)] * 3


def sums_on_interfaces(interfaces):
    from verl_mg.distributed import world

    world._devices.cache_clear()
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    try:
        return sums_over_groups(2)
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
        world._devices.cache_clear()


def test_groups_on_two_interfaces_have_one_event_loop_for_each(ranks):
    # The default group was created before, on the default interface.
    assert ranks.run(2, sums_on_interfaces, "lo,lo") == [([3.0, 3.0], 3)] * 2
