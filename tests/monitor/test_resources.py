"""Memory and use of hosts and GPUs: what a sample contains, the metrics over ranks, and that nothing is awaited."""

import inspect
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from tests.helpers.cuda_tensors import FakeCuda
from tests.helpers.fake_cuda import recorded_cuda_calls
from verl_mg.monitor.metrics import GIB, ResourceSampler, over_ranks, weight_sync_rate


def test_sampler_returns_the_largest_memory_since_the_last_call():
    sampler = ResourceSampler(interval_s=0.01)
    time.sleep(0.1)
    first, second = sampler.take(), sampler.take()
    sampler.close()
    for taken in (first, second):
        assert taken.keys() == {"host_memory_gib"}
        assert 0 < taken["host_memory_gib"] < psutil.virtual_memory().total / GIB


def _with_driver(function: str, *values: int) -> Callable[[torch.device], int]:
    """Stands for a query of the driver; called with what torch's own function takes."""
    signature, left = inspect.signature(getattr(torch.cuda, function)), list(values)

    def query(*arguments: Any) -> int:
        assert signature.bind(*arguments).arguments["device"] == torch.device("cuda", 0)
        return left.pop(0) if len(left) > 1 else left[0]

    return query


def samples_of_a_gpu(_: FakeCuda) -> tuple[list[dict[str, float]], list[str]]:
    """Two calls of `take`, and what they order on the device."""
    torch.cuda.device_memory_used = _with_driver("device_memory_used", 2 << 30, 5 << 30, 3 << 30)
    torch.cuda.utilization = _with_driver("utilization", 20, 40, 90)
    with recorded_cuda_calls() as calls:
        sampler = ResourceSampler(interval_s=3600.0)
        sampler._samples = [sampler._sample(), sampler._sample()]
        taken = [sampler.take(), sampler.take()]
        sampler.close()
    return taken, calls


@pytest.mark.nightly  # starts the process with the fake GPU
def test_sampler_with_a_gpu_asks_the_driver_and_awaits_nothing(fake_cuda):
    (first, second), calls = fake_cuda.run(samples_of_a_gpu)
    assert (first["gpu_memory_gib"], first["gpu_utilization"]) == (5.0, pytest.approx(0.3))
    assert (second["gpu_memory_gib"], second["gpu_utilization"]) == (3.0, pytest.approx(0.9))
    assert calls == []


def test_over_ranks_has_the_smallest_mean_and_largest_value():
    metrics = over_ranks([{"gpu_memory_gib": 2.0, "host_memory_gib": 8.0}, {"host_memory_gib": 4.0}])
    assert metrics == {
        **{f"time/gpu_memory_gib/{which}": 2.0 for which in ("min", "mean", "max")},
        "time/host_memory_gib/min": 4.0,
        "time/host_memory_gib/mean": 6.0,
        "time/host_memory_gib/max": 8.0,
    }


def test_weight_sync_rate_is_that_of_a_rank():
    metrics = {"weight_sync/bytes_received": 8e9, "time/weight_sync": 2.0}
    assert weight_sync_rate(metrics, ranks=4) == {"time/weight_sync_gb_per_s": 1.0}
    assert weight_sync_rate({"time/weight_sync": 2.0}, ranks=4) == {}
