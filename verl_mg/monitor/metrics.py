"""Metrics of an iteration: samples, tokens per second, share of the arithmetic of devices (MFU), host and GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg import device
from verl_mg.algorithms import mismatch
from verl_mg.algorithms.aggregation import segment_totals
from verl_mg.batch import SUPPORT_SIZES, Batch
from verl_mg.distributed.collectives import sum_by_name
from verl_mg.models.flops import RowFlops, row_flops
from verl_mg.training.microbatch import SHARED_TOKENS, MicroBatch
from verl_mg.training.runner import Runner

# Interval between two samples. The driver averages the use of a GPU over up to a second itself.
SAMPLE_SECONDS = 1.0
GIB = 2.0**30
HOST_MEMORY, GPU_MEMORY, GPU_UTILIZATION = "host_memory_gib", "gpu_memory_gib", "gpu_utilization"

log = logging.getLogger(__name__)
PEAK_TERAFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H200 NVL": 835.0,
    "H200": 989.4,
    "GH200": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "GB200": 2500.0,
    "GB300": 2500.0,
    "B200": 2250.0,
    "B300": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "MI300X": 1307.4,
}
"""TFLOP/s of dense bf16 matrix products by words of the device's name, from the vendors' data sheets."""


class ResourceSampler:
    """Samples host and GPU in a thread until `close`: GiB of all processes, share of time in which GPUs compute."""

    def __init__(self, interval_s: float = SAMPLE_SECONDS) -> None:
        self._interval, self._device = interval_s, device.current_device()
        # GPU: memory in use and share of busy time, as the driver reports them.
        # GPU-TEST: tests/monitor/test_resources.py::test_sampler_with_a_gpu_asks_the_driver_and_awaits_nothing
        # GPU-RAN: not yet
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


def peak_flops(device_name: str) -> float | None:
    """Returns the peak bf16 FLOP/s of a device; None where it is not in the table."""
    words = device_name.replace("-", " ").split()
    matches = [name for name in PEAK_TERAFLOPS if set(name.split()) <= set(words)]
    return PEAK_TERAFLOPS[max(matches, key=len)] * 1e12 if matches else None


def device_peak() -> float | None:
    """Returns the peak FLOP/s of this process's GPU; None on the CPU."""
    # GPU: the peak of the card by its name, for `time/mfu`.
    # GPU-TEST: tests/monitor/test_throughput.py::test_peak_flops_known_devices
    # GPU-RAN: h200-1, h100-1
    return peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def model_flops(
    rows: RowFlops, lengths: Sequence[int], learns: bool, adapters: bool = False, shared: Sequence[int] | None = None
) -> float:
    """Computes the FLOPs of a model on rows, of which others compute the first `shared` tokens."""
    # A backward pass has twice the FLOPs of the forward pass, half of them for weight gradients, which adapters skip.
    passes = 1.0 if not learns else 2.0 if adapters else 3.0
    return passes * sum(map(rows, lengths, shared or [0] * len(lengths)))


class Throughput:
    """Counts the micro-batches that enter the models of this rank."""

    def __init__(self, runners: Iterable[Runner]) -> None:
        self._flops = self._trained_tokens = 0.0
        for runner in runners:
            for module in runner.entry_modules:
                rows = row_flops(runner.table.config, runner.table.tensor_index)
                module.register_forward_pre_hook(partial(self._enter, runner=runner, rows=rows))

    def take(self, produced: Sequence[Batch]) -> dict[str, float]:
        """Returns the counts of this rank since the last call; `produced` are its rows of the iteration."""
        # Tokens are prompt and response tokens; without rows, as in SFT, the trained tokens count.
        tokens = float(sum(map(_distinct_tokens, produced)))
        counts = {"tokens": tokens, "trained": self._trained_tokens, "flops": self._flops}
        self._flops = self._trained_tokens = 0.0
        return counts

    def _enter(self, chunk: torch.nn.Module, arguments: tuple[Any, ...], runner: Runner, rows: RowFlops) -> None:
        micro: MicroBatch[Any] = arguments[0]
        # A pass that computes log-probabilities has no backward pass, and counts only its forward FLOPs.
        learns, group = torch.is_grad_enabled(), micro.packed.cp_group
        # All ranks that share a micro-batch see all of it: each counts its share.
        sharing = runner.layout.tp * runner.layout.pp * (dist.get_world_size(group) if group else 1)
        lengths = micro.rows.lengths.tolist()
        shared = micro.rows[SHARED_TOKENS].tolist() if SHARED_TOKENS in micro.rows else None
        self._flops += model_flops(rows, lengths, learns, runner.lora is not None, shared) / sharing
        self._trained_tokens += sum(lengths) / sharing if learns else 0.0


def rates(counts: Sequence[Mapping[str, float]], seconds: float, peak: float | None) -> dict[str, float]:
    """Computes the rates of an iteration from the counts of all ranks; `peak` is the FLOP/s of a device."""
    # `time/mfu` is less than the MFU of an update: the seconds include generation, the FLOPs do not.
    totals = sum_by_name(counts)
    rate = (totals["tokens"] or totals["trained"]) / seconds
    metrics = {"time/tokens_per_second": rate, "time/tokens_per_second_per_rank": rate / len(counts)}
    if peak is not None:
        metrics["time/mfu"] = totals["flops"] / (seconds * len(counts) * peak)
    return metrics


def weight_sync_rate(metrics: Mapping[str, float], ranks: int) -> dict[str, float]:
    """Returns the metric `time/weight_sync_gb_per_s`: received GB of a rank per second of the last weight sync."""
    received, seconds = metrics.get("weight_sync/bytes_received"), metrics.get("time/weight_sync")
    if received is None or not seconds:
        return {}
    return {"time/weight_sync_gb_per_s": received / ranks / seconds / 1e9}


def _distinct_tokens(batch: Batch) -> int:
    """Returns the tokens of a batch without the prefixes that rows repeat."""
    return batch.total_tokens - (int(batch["prefix_length"].sum()) if "prefix_length" in batch else 0)


def rollout_metrics(reports: Sequence[Mapping[str, float]], agent_names: Sequence[str] = ()) -> dict[str, float]:
    """Computes means over all samples from the `rollout_sums` of all ranks, a sample of each agent with a name counting
    for itself."""
    sums = sum_by_name(reports)
    if not sums.get("samples"):
        return {}
    samples = sums["samples"]
    metrics = {
        "response/length": sums["tokens"] / samples,
        "response/truncated": sums["truncated"] / samples,
        "response/samples": samples,
        "rollout/staleness": sums["staleness"] / max(sums["tokens"], 1.0),
    }
    if "candidates" in sums:
        metrics["rollout/candidates"] = sums["candidates"] / max(sums["tokens"], 1.0)
    if "reward" in sums:
        mean = sums["reward"] / samples
        metrics["reward/mean"] = mean
        metrics["reward/std"] = max(sums["reward_squared"] / samples - mean**2, 0.0) ** 0.5
    for name in sums:
        if name.startswith("reward."):
            # Not every reward has every part: the mean is over those that have it.
            metrics[f"reward/{name.removeprefix('reward.')}"] = sums[name] / max(sums[f"count.{name}"], 1.0)
    for number, name in enumerate(agent_names):
        if count := sums.get(f"samples of agent {number}"):
            metrics[f"reward/agent/{name}"] = sums[f"reward of agent {number}"] / count
    return metrics


def rollout_sums(batches: Sequence[Batch], version: int) -> dict[str, float]:
    """Returns sums over this rank's samples; staleness in optimizer steps before `version`, which is trained."""
    return sum_by_name([_sums(batch, version) for batch in batches])


def _sums(batch: Batch, version: int) -> dict[str, Tensor]:
    mask, samples = batch["loss_mask"], batch.one_per_trajectory()
    truncated = segment_totals(batch["truncated"], batch.trajectory_index)[batch.first_rows] > 0
    # In double precision, since the variance is a difference of two sums.
    sums = {
        "samples": torch.tensor(float(len(samples))),
        "tokens": mask.double().sum(),
        "truncated": truncated.double().sum(),
        "staleness": (version - batch["policy_versions"][mask]).double().sum(),
    }
    if SUPPORT_SIZES in batch:
        sums["candidates"] = batch[SUPPORT_SIZES].double().sum()
    if "reward" in batch:
        reward = samples["reward"].double()
        sums |= {"reward": reward.sum(), "reward_squared": reward.square().sum()}
        for name in (name for name in batch.names() if name.startswith("reward.")):
            sums |= {name: samples[name].double().nansum(), f"count.{name}": (~samples[name].isnan()).sum()}
        for number in samples["agent"].unique().tolist() if "agent" in batch else ():
            of_agent = reward[samples["agent"] == number]
            sums |= {
                f"reward of agent {number}": of_agent.sum(),
                f"samples of agent {number}": torch.tensor(len(of_agent)),
            }
    return sums


def mismatch_statistics(batches: Sequence[Batch]) -> dict[str, float]:
    """Returns statistics of the difference of `old_logprobs` and `rollout_logprobs` on this rank."""
    parts = [
        mismatch.statistics(batch["old_logprobs"], batch["rollout_logprobs"], batch["loss_mask"], batch.positions)
        for batch in batches
        if "old_logprobs" in batch and batch["old_logprobs"] is not batch["rollout_logprobs"]
    ]
    return mismatch.merge(parts)


def mismatch_metrics(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Computes the mismatch from the statistics of all ranks."""
    return {f"mismatch/{name}": value for name, value in mismatch.summarize(mismatch.merge(reports)).items()}
