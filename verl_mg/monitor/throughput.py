"""Tokens a second, and what share of the devices' arithmetic a job makes use of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from verl_mg.batch import Batch
from verl_mg.distributed.collectives import sum_over_ranks
from verl_mg.megatron.microbatch import MicroBatch
from verl_mg.megatron.model_runner import ModelRunner
from verl_mg.models.flops import RowFlops, row_flops

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
"""TFLOP/s of dense bf16 matrix products, by a part of the device's name; from the makers' data sheets."""


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of bf16 that a device could do at most; None for one that is not in the table."""
    words = device_name.replace("-", " ").split()
    found = [name for name in PEAK_TERAFLOPS if _within(name.split(), words)]
    return PEAK_TERAFLOPS[max(found, key=len)] * 1e12 if found else None


def _within(part: Sequence[str], words: Sequence[str]) -> bool:
    """Whether the words of `part` are among those of the name: H100 NVL is in NVIDIA H100 NVL, H20 not in H200."""
    return set(part) <= set(words)


def device_peak() -> float | None:
    """Of this process's GPU; None on the CPU too."""
    return peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def model_flops(rows: RowFlops, lengths: Sequence[int], learns: bool, adapters: bool = False) -> float:
    """FLOPs that the mathematics of rows of these lengths needs; what is recomputed does not count.

    A forward pass, and where the network learns a backward pass of twice that, of which the gradients of weights that
    adapters hold fixed, one half, are never made.
    """
    passes = 1.0 if not learns else 2.0 if adapters else 3.0
    return passes * sum(map(rows, lengths))


class Throughput:
    """Counts micro-batches where they enter the networks of this rank, and tells the rates of each iteration.

    peak: FLOP/s of one rank's device at most; None: not known.
    """

    def __init__(self, runners: Iterable[ModelRunner], peak: float | None) -> None:
        self._peak = peak
        self._flops = self._trained_tokens = 0.0
        for runner in runners:
            # Of an interleaved pipeline's chunks each sees every micro-batch; the first one stands for all.
            for chunk in runner.chunks[:1]:
                rows = row_flops(runner.table.config, runner.table.tensor_index)
                chunk.register_forward_pre_hook(partial(self._enter, runner=runner, rows=rows))

    def iteration(self, produced: Sequence[Batch], seconds: float) -> dict[str, float]:
        """Of the iteration that ends here; all ranks call it together.

        produced: this rank's rows of the samples; without any on all ranks, as in imitation, the tokens that were
        trained on count in their place.

        `time/tokens_per_second`: tokens of prompts and responses, of all ranks, by the seconds of the whole iteration;
        `time/tokens_per_second_per_rank`; `time/mfu`: FLOPs that training and judging needed, see `model_flops`, by
        what all devices could have done in these seconds. Generation is in the seconds and not in the FLOPs, so this
        is less than the MFU of an update alone.
        """
        tokens = float(sum(batch.total_tokens for batch in produced))
        told = sum_over_ranks([{"tokens": tokens, "trained": self._trained_tokens, "flops": self._flops}])
        self._flops = self._trained_tokens = 0.0
        ranks = dist.get_world_size()
        rate = (told["tokens"] or told["trained"]) / seconds
        metrics = {"time/tokens_per_second": rate, "time/tokens_per_second_per_rank": rate / ranks}
        if self._peak is not None:
            metrics["time/mfu"] = told["flops"] / (seconds * ranks * self._peak)
        return metrics

    def _enter(
        self, chunk: torch.nn.Module, arguments: tuple[MicroBatch, float], runner: ModelRunner, rows: RowFlops
    ) -> None:
        micro, _ = arguments
        learns, group = torch.is_grad_enabled(), micro.packed.context
        # All ranks that share a micro-batch see it whole: each counts its share.
        sharing = runner.layout.tp * runner.layout.pp * (dist.get_world_size(group) if group else 1)
        lengths = micro.rows.lengths.tolist()
        self._flops += model_flops(rows, lengths, learns, runner.lora is not None) / sharing
        self._trained_tokens += sum(lengths) / sharing if learns else 0.0
