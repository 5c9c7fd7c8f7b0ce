"""Ranks meet in a part of the store that no earlier start has touched."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from verl_mg.distributed.rendezvous import wait_for_fresh_store

RANKS = 4


def meet(store: Store, ranks: list[int]) -> list[int]:
    """How many of the ranks each of them has counted in the part that it was given."""

    def rank(number: int) -> Store:
        return wait_for_fresh_store(store, number, RANKS, timedelta(seconds=20))

    with ThreadPoolExecutor(len(ranks)) as threads:
        parts = list(threads.map(rank, ranks))
    return [part.add("counted", 1) for part in parts]


def test_each_start_has_a_part_of_its_own():
    store = HashStore()
    for _ in range(3):
        assert meet(store, list(range(RANKS))) == [1, 2, 3, 4]


def test_what_a_failed_start_has_left_helps_nobody():
    store = HashStore()
    with pytest.raises(TimeoutError, match=r"ranks \[3\] did not come"):
        fresh_without_the_last(store)
    assert meet(store, [3, 2, 1, 0]) == [1, 2, 3, 4]


def fresh_without_the_last(store: Store) -> None:
    with ThreadPoolExecutor(RANKS) as threads:
        started = [
            threads.submit(wait_for_fresh_store, store, number, RANKS, timedelta(seconds=1))
            for number in range(RANKS - 1)
        ]
        started[0].result()
