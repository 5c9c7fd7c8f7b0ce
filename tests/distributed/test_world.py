"""`World.join` on a rank with a GPU, whose parts of torch.cuda are recorded, and in a process with real limits."""

import inspect
import json
import os
import resource
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store

from tests.helpers import warm_start
from tests.helpers.counted_store import CountedStore
from verl_mg import device
from verl_mg.config import JobConfig
from verl_mg.distributed import rendezvous
from verl_mg.distributed.rendezvous import wait_for_fresh_store
from verl_mg.distributed.world import World

JOIN = """
import json, os, torch
seen = []
def is_available():
    seen.append(dict(os.environ))
    return False
torch.cuda.is_available = is_available
from verl_mg.distributed.world import World
World.join()
print(json.dumps(seen[0]))
"""


@pytest.fixture
def calls(monkeypatch):
    """Calls of torch that `World.join` makes on a rank with a GPU, in order."""
    made = []

    def record(name, real):
        signature = inspect.signature(real) if name in ("init_process_group", "all_reduce") else None

        def call(*arguments, **options):
            given = signature.bind(*arguments, **options).arguments if signature else arguments
            made.append((name, given))

        return call

    for name in ("RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "set_default_variables", lambda: None)  # they would stay in this process
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "current_device", lambda: torch.device("meta"))  # stands for a GPU
    for owner, name in (
        (torch.cuda, "set_device"),
        (torch.cuda, "synchronize"),
        (torch, "set_num_threads"),
        (dist, "init_process_group"),
        (dist, "all_reduce"),
        (dist, "new_group"),
        (dist, "barrier"),
    ):
        monkeypatch.setattr(owner, name, record(name, getattr(owner, name)))
    return made


def test_join_with_a_gpu_enters_a_collective_first_and_waits_longer_than_a_stall(calls):
    World.join()
    names = [name for name, _ in calls]
    communication = [name for name in names if name not in ("set_device", "set_num_threads")]
    assert communication == ["init_process_group", "all_reduce", "synchronize"]
    assert names.index("set_device") < names.index("all_reduce")
    given = dict(calls)
    assert given["all_reduce"].keys() == {"tensor"} and given["all_reduce"]["tensor"].device.type == "meta"
    made = given["init_process_group"]
    assert "device_id" not in made and made["backend"] == "cpu:gloo,cuda:nccl"
    timeout = made["timeout"]
    assert timeout > 24 * timedelta(seconds=JobConfig().stall_timeout_s)
    assert timeout / timedelta(milliseconds=1) < 2**31  # of C++ programs that count milliseconds


def test_join_with_a_gpu_divides_the_cores_among_the_ranks_of_the_node(calls, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(24)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    World.join()
    assert ("set_num_threads", (3,)) in calls


def test_join_raises_the_limit_of_open_files(calls):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, limits[1]), limits[1]))
    try:
        World.join()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_world_join_sets_defaults_of_cuda_and_nccl_before_cuda_is_used():
    warm = warm_start.shared()
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "CUDA_"))}
    joined = subprocess.run(
        [warm.python, "-c", JOIN], env=variables | {"NCCL_CUMEM_ENABLE": "1"}, stdout=subprocess.PIPE, check=True
    )
    found = json.loads(joined.stdout.splitlines()[-1])
    assert {name: found[name] for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE")} == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "1",
    }  # fmt: skip


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
