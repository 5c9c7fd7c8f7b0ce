"""Rendezvous in a namespace of the store that no earlier launch has used, and ranks started by MPI."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore, Store

from tests.helpers.counted_store import CountedStore
from verl_mg.distributed import rendezvous
from verl_mg.distributed.rendezvous import wait_for_fresh_store

RANKS = 4
PATIENCE = timedelta(minutes=10)


def counts_in_fresh_store(store: Store, ranks: list[int]) -> list[int]:
    """Value of a shared counter that each rank sees in the namespace it was given."""

    def rank(number: int) -> Store:
        return wait_for_fresh_store(store, number, RANKS, PATIENCE)

    with ThreadPoolExecutor(len(ranks)) as threads:
        parts = list(threads.map(rank, ranks))
    return [part.add("counted", 1) for part in parts]


def start_without_last_rank(store: Store) -> None:
    with ThreadPoolExecutor(RANKS) as threads:
        for number in range(1, RANKS - 1):
            threads.submit(wait_for_fresh_store, store, number, RANKS, timedelta(seconds=1))
        store.wait([f"token/{number}" for number in range(1, RANKS - 1)], PATIENCE)
        wait_for_fresh_store(store, 0, RANKS, timedelta(seconds=1))


def test_fresh_store_of_each_launch_is_empty():
    store = HashStore()
    for _ in range(3):
        assert counts_in_fresh_store(store, list(range(RANKS))) == [1, 2, 3, 4]


def test_fresh_store_needs_a_fixed_number_of_requests_of_each_rank(monkeypatch):
    shared = HashStore()
    stores = [CountedStore(shared) for _ in range(RANKS)]

    def wait_for_others(seconds):
        """Rank 0 looks again when all others have acknowledged, which takes long on a busy machine."""
        while any(len(store.requests) < 4 for store in stores[1:]):
            time.sleep(0.001)
        time.sleep(seconds)

    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait_for_others))
    with ThreadPoolExecutor(RANKS) as threads:
        arriving = [
            threads.submit(wait_for_fresh_store, store, number, RANKS, PATIENCE)
            for number, store in enumerate(stores[:-1])
        ]
        while any("wait" not in store.requests for store in stores[:-1]):
            time.sleep(0.001)
        wait_for_fresh_store(stores[-1], RANKS - 1, RANKS, PATIENCE)
        for rank in arriving:
            rank.result()
    assert [store.requests for store in stores[1:]] == [["set", "wait", "get", "set"]] * (RANKS - 1)
    assert len(stores[0].requests) <= 12


def test_fresh_store_after_a_failed_launch_ignores_its_keys():
    store = HashStore()
    with pytest.raises(TimeoutError, match=r"ranks \[3\] did not arrive"):
        start_without_last_rank(store)
    assert counts_in_fresh_store(store, [3, 2, 1, 0]) == [1, 2, 3, 4]
