"""Memory and use of the device and the host of a rank, sampled from a thread while an iteration runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

import psutil
import torch

from verl_mg import device

# Interval between two samples. The driver averages the use of a GPU over up to a second itself.
SAMPLE_SECONDS = 1.0
GIB = 2.0**30
HOST_MEMORY, GPU_MEMORY, GPU_UTILIZATION = "host_memory_gib", "gpu_memory_gib", "gpu_utilization"

log = logging.getLogger(__name__)


class ResourceSampler:
    """Samples host and GPU in a thread until `close`: GiB of all processes, share of time in which GPUs compute."""

    def __init__(self, interval_s: float = SAMPLE_SECONDS) -> None:
        self._interval, self._device = interval_s, device.current_device()
        self._asks_driver = self._device.type == "cuda"
        self._samples: list[dict[str, float]] = []
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True, name="resources")
        self._thread.start()

    def take(self) -> dict[str, float]:
        """Returns the largest memory and the mean use of the GPU since the last call."""
        # Values of the GPU are missing on the CPU, and without the package nvidia-ml-py.
        # An iteration that is shorter than the interval has no sample yet.
        with self._lock:
            samples, self._samples = self._samples or [self._sample()], []
        values = {name: [sample[name] for sample in samples if name in sample] for name in samples[0]}
        return {name: sum(v) / len(v) if name == GPU_UTILIZATION else max(v) for name, v in values.items()}

    def close(self) -> None:
        """Ends the thread of the samples."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        # Takes a sample every interval; woken early only by `close`, which ends it.
        while not self._ended.wait(self._interval):
            with self._lock:
                self._samples.append(self._sample())

    def _sample(self) -> dict[str, float]:
        memory = psutil.virtual_memory()
        sample = {HOST_MEMORY: (memory.total - memory.available) / GIB}
        if self._asks_driver:
            try:
                sample[GPU_MEMORY] = torch.cuda.device_memory_used(self._device) / GIB
                sample[GPU_UTILIZATION] = torch.cuda.utilization(self._device) / 100
            except Exception as error:  # each driver library has its own errors
                self._asks_driver = False
                log.warning("GPU memory and use are not measured: %s: %s", type(error).__name__, error)
        return sample


def over_ranks(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the metrics `time/NAME/min`, `mean` and `max` of measurements."""
    # They begin with `time/`, as all metrics that differ between equal runs.
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for report in reports for name in report):
        values = [report[name] for report in reports if name in report]
        metrics |= {
            f"time/{name}/min": min(values),
            f"time/{name}/mean": sum(values) / len(values),
            f"time/{name}/max": max(values),
        }
    return metrics
