"""Tokens per second, and the share of the devices' arithmetic that a job uses (MFU)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from verl_mg.batch import Batch
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.models.flops import RowFlops, row_flops
from verl_mg.monitor.resources import over_ranks
from verl_mg.training.microbatch import SHARED_TOKENS, MicroBatch
from verl_mg.training.runner import Runner

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


def peak_flops(device_name: str) -> float | None:
    """Returns the peak bf16 FLOP/s of a device; None where it is not in the table."""
    words = device_name.replace("-", " ").split()
    matches = [name for name in PEAK_TERAFLOPS if _within(name.split(), words)]
    return PEAK_TERAFLOPS[max(matches, key=len)] * 1e12 if matches else None


def _within(part: Sequence[str], words: Sequence[str]) -> bool:
    """Returns whether all words of `part` occur in a name: H100 NVL in NVIDIA H100 NVL, but not H20 in H200."""
    return set(part) <= set(words)


def device_peak() -> float | None:
    """Returns the peak FLOP/s of this process's GPU; None on the CPU."""
    return peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def model_flops(
    rows: RowFlops, lengths: Sequence[int], learns: bool, adapters: bool = False, shared: Sequence[int] | None = None
) -> float:
    """Computes the FLOPs of a model on rows, of which others compute the first `shared` tokens."""
    # A backward pass has twice the FLOPs of the forward pass, half of them for weight gradients, which adapters skip.
    passes = 1.0 if not learns else 2.0 if adapters else 3.0
    return passes * sum(map(rows, lengths, shared or [0] * len(lengths)))


class Throughput:
    """Counts the micro-batches that enter the models of this rank, and computes the rates of each iteration."""

    def __init__(self, runners: Iterable[Runner], peak: float | None) -> None:
        self._peak = peak
        self._flops = self._trained_tokens = 0.0
        for runner in runners:
            for module in runner.entry_modules:
                rows = row_flops(runner.table.config, runner.table.tensor_index)
                module.register_forward_pre_hook(partial(self._enter, runner=runner, rows=rows))

    def iteration(
        self, produced: Sequence[Batch], seconds: float, measured: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Computes the rates of the iteration that ends now, from this rank's rows `produced`; collective."""
        # Tokens are prompt and response tokens; without rows, as in SFT, the trained tokens. `time/mfu` is less than
        # the MFU of an update: the seconds include generation, the FLOPs do not.
        # `measured` is sent with the counts, so that it costs no further collective.
        tokens = float(sum(map(_distinct_tokens, produced)))
        counts = {"tokens": tokens, "trained": self._trained_tokens, "flops": self._flops}
        reports = all_gather_json({"counts": counts, "measured": dict(measured or {})})
        totals = {name: sum(report["counts"][name] for report in reports) for name in counts}
        self._flops = self._trained_tokens = 0.0
        ranks = dist.get_world_size()
        rate = (totals["tokens"] or totals["trained"]) / seconds
        metrics = {"time/tokens_per_second": rate, "time/tokens_per_second_per_rank": rate / ranks}
        if self._peak is not None:
            metrics["time/mfu"] = totals["flops"] / (seconds * ranks * self._peak)
        return metrics | over_ranks([report["measured"] for report in reports])

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


def weight_sync_rate(metrics: Mapping[str, float], ranks: int) -> dict[str, float]:
    """Returns the metric `time/weight_sync_gb_per_s`: received GB of a rank per second of the last weight sync."""
    received, seconds = metrics.get("weight_sync/bytes_received"), metrics.get("time/weight_sync")
    if received is None or not seconds:
        return {}
    return {"time/weight_sync_gb_per_s": received / ranks / seconds / 1e9}


def _distinct_tokens(batch: Batch) -> int:
    """Returns the tokens of a batch without the prefixes that rows repeat."""
    return batch.total_tokens - (int(batch["prefix_length"].sum()) if "prefix_length" in batch else 0)
