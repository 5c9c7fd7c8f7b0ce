"""Data sheets of GPUs, the fractions of them that jobs reach, and latencies: the few constants of the cost model.

Data sheets are NVIDIA's of the product named, dense (without sparsity) and per GPU; links are counted in one direction.
`network` is the adapter of the usual system: ConnectX-7 at 400 Gb/s for each GPU, HDR at 200 Gb/s for A100.

Of an H100 and an H200 the rates of `benchmarks/` take the place of fractions of the data sheet, also in the fit.

`FITTED` is the fit of `tools/calibrate_plan.py` on published figures (`tools/published_steps.json`), which also prints
the error of each row, with the row in the fit and without it. No constant belongs to a model, a system or a row. So the
model predicts layouts and options that nothing was measured for, with a known error. Constants have bounds that are
physically possible: without them a fit trades matrix products against memory traffic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_mg.errors import UserError

DEFAULT_GPU = "h100"
HOST_FRACTION = 0.8
"""Fraction of the bandwidth to the host that pinned copies reach. Not fitted."""
UNFUSED = 2.0
"""Kernels and bytes of norms, rotary embedding and permutation by `torch`, relative to Transformer Engine. Not fitted:
every published row uses Transformer Engine."""


@dataclass(frozen=True)
class GPU:
    """Peak rates and memory of one GPU."""

    bf16: float  # TFLOP/s of dense bf16 matrix products
    fp8: float  # TFLOP/s of dense FP8 matrix products; 0: it has no FP8
    memory: float  # GiB of its memory
    bandwidth: float  # GB/s of its memory
    link: float  # GB/s to other GPUs over NVLink
    network: float  # GB/s to GPUs outside the NVLink domain
    # GB/s to the host's memory: PCIe, or NVLink-C2C of Grace systems.
    host: float
    node: int = 8  # GPUs of an NVLink domain, as a number that divides powers of two
    measured: Mapping[str, float] = field(default_factory=dict)
    """Figures of a plan that `tools/bench/bench_gpu.py` measured, in place of fractions of the data sheet."""


GPUS = {
    "a100": GPU(312, 0, 80, 2039, 300, 25, 32),
    "h20": GPU(148, 296, 96, 4000, 450, 50, 64),
    # Measured figures: benchmarks/h100-1/measured_h100.json and benchmarks/h200-1/measured_h200.json.
    "h100": GPU(989, 1979, 80, 3350, 450, 50, 64,
                measured={"flops": 747.8, "memory_bandwidth": 2995.6, "memory": 79.2, "host": 55.0}),
    "h200": GPU(989, 1979, 141, 4800, 450, 50, 64,
                measured={"flops": 755.0, "memory_bandwidth": 4218.4, "memory": 139.8, "host": 55.1}),
    "b200": GPU(2250, 4500, 180, 8000, 900, 50, 64),
    # 72 GPUs of an NVL72 rack share NVLink; jobs of powers of two use 64 of them.
    "gb200": GPU(2500, 5000, 186, 8000, 900, 50, 450, node=64),
    "gb300": GPU(2500, 5000, 288, 8000, 900, 100, 450, node=64),
}  # fmt: skip
"""GPUs that a plan knows, by the name of `verl-mg plan --gpu`."""


def gpu(name: str) -> GPU:
    """Returns the data sheet of a GPU by its name in `GPUS`."""
    if name not in GPUS:
        raise UserError(f"--gpu: {name!r} is unknown. Use {', '.join(GPUS)}, or give figures with --measured FILE.")
    return GPUS[name]


@dataclass(frozen=True)
class Efficiency:
    """Constants of the cost model, by default those fitted on published figures."""

    gemm: float = 0.754  # fraction of the peak of matrix products with many rows
    half_rows: float = 319
    """Rows (tokens) whose time each matrix product has in addition: reading its weights, filling tiles."""
    attention: float = 0.849  # speed of fused attention, relative to matrix products with many rows
    fp8: float = 1.48  # speed of FP8 matrix products with their casts, relative to bf16; the peak is twice as high
    memory: float = 0.776  # fraction of the bandwidth of a GPU's memory
    link: float = 0.95  # fraction of the bandwidth of NVLink and network that collectives of training reach
    elementwise: float = 3.65
    """Bytes that kernels other than matrix products and attention move, for each byte kept for the backward pass."""
    layer: float = 0.00011
    """Seconds in which the host launches the kernels of a pass over a layer, which the device's work overlaps."""
    expert_layer: float = 0.0015
    """Seconds of a pass over a mixture of experts that do not depend on its tokens: the device waits for the host,
    which has to know the tokens of each expert."""
    imbalance: float = 1.32
    """Tokens of the fullest expert-parallel rank, relative to the mean, where routing is not forced to be even."""
    decode_step: float = 0.0105  # seconds of a decoding step outside of the layers: scheduling, sampling, output
    decode_sample: float = 4.67e-05  # seconds of a decoding step on the host for each running sample
    decode_layer: float = 3.68e-05  # seconds of a layer in a decoding step that do not depend on bytes or tokens
    all_reduce_near: float = 1.09e-05  # seconds of an all-reduce of a small message in a node
    all_reduce_far: float = 6.36e-05  # the same between nodes
    sync: float = 0.4  # fraction of the links that a weight sync reaches which sends shards
    sync_start: float = 0.242  # seconds of a weight sync that do not depend on its bytes
    gathering: float = 0.16
    """Fraction of the links that a weight sync with full tensors reaches (published systems; not this one)."""
    iteration: float = 4.73
    """Seconds of an iteration outside of the phases: data, rewards, allocator, switches between phases."""

    def figures(self, gpu: GPU) -> dict[str, float]:
        """Returns the hardware figures of a plan for a GPU: those measured, else what jobs reach of its data sheet."""
        sheet = {
            "flops": self.gemm * gpu.bf16,
            "peak": gpu.bf16,
            "memory": gpu.memory,
            "memory_bandwidth": self.memory * gpu.bandwidth,
            "intra_node": self.link * gpu.link,
            "inter_node": self.link * gpu.network,
            "host": HOST_FRACTION * gpu.host,
        }
        return {**sheet, **gpu.measured}


FITTED = Efficiency()


@dataclass(frozen=True)
class Calibration:
    """Error of the cost model on published figures, as a fraction of them."""

    rows: int = 57  # number of published figures that `FITTED` is fitted on
    median: float = 0.0971  # median error of these
    worst: float = 0.951  # largest error of these
    worst_row: str = "Qwen3-30B-A3B pretraining in FP8 on 16 H100"  # the figure with the largest error
    left_out: float = 0.140  # median error of each of them, predicted by a fit on the others
    others: int = 41  # number of published figures that were not fitted
    others_median: float = 0.167  # median error of the figures that were not fitted

    def __str__(self) -> str:
        return (
            f"fitted on {self.rows} published figures with a median error of {self.median:.0%} "
            f"({self.left_out:.0%} for one that is left out), the worst {self.worst:.0%} ({self.worst_row}), and "
            f"{self.others_median:.0%} on {self.others} others"
        )


CALIBRATION = Calibration()
"""Error of `FITTED`, as tools/calibrate_plan.py computes it."""
