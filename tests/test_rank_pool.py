"""The pool of ranks on machines of other kinds, and what it says of ranks that hang."""

import time
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from tests.helpers import rank_pool
from tests.helpers.machine import Machine
from tests.helpers.rank_pool import RankError, RankPool


def meet_or_hang() -> int:
    if dist.get_rank() == 1:
        time.sleep(9999)
    return dist.get_rank()


def test_ranks_that_hang_are_named_with_their_stacks_and_replaced(monkeypatch):
    pool = RankPool(Machine(0, (), 2))

    def until_both_hang(pipes: list[Connection], timeout: float) -> list[Connection]:
        """The time of the ranks is over as soon as both are where they stay."""
        for rank, place in enumerate(("in barrier", "in meet_or_hang")):
            while place not in pool._stacks(rank).read_text():
                pool._stacks_of([rank])
        return []

    try:
        assert pool.run(2, dist.get_rank) == [0, 1]
        monkeypatch.setattr(rank_pool, "STACKS_S", 0.1)
        monkeypatch.setattr(rank_pool, "wait", until_both_hang)
        with pytest.raises(RankError, match=r"(?s)ranks \[0, 1\] did not finish in .* s.*in barrier.*in meet_or_hang"):
            pool.run(2, meet_or_hang)
        monkeypatch.undo()
        assert pool.run(1, meet_or_hang) == [0]
    finally:
        pool.stop()


@pytest.mark.nightly
def test_ranks_of_machine_with_gpus_are_spawned_and_know_functions_of_tests():
    pool = RankPool(Machine(1, (2, 30, 7), 2))  # there is no GPU: they meet over gloo
    try:
        assert pool.run(2, dist.get_world_size) == [2, 2] and pool.run(1, meet_or_hang) == [0]
    finally:
        pool.stop()


def test_more_ranks_than_gpus_skip_with_reason():
    with pytest.raises(
        pytest.skip.Exception, match="4 ranks: this machine has 2 GPUs, .* from NCCL 2.30.3 on; .* 2.27.7"
    ):
        RankPool(Machine(2, (2, 27, 7))).run(4, meet_or_hang)
