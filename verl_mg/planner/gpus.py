"""Data sheets of GPUs: peak figures of the maker, of which a job reaches the fractions in `efficiency`.

Sources are NVIDIA's data sheets of the product named, dense (without sparsity) and per GPU; links are counted in one
direction. `network` is the adapter of the usual system: ConnectX-7 at 400 Gb/s for each GPU, HDR at 200 Gb/s for A100.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_mg.errors import UserError


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


GPUS = {
    "a100": GPU(312, 0, 80, 2039, 300, 25, 32),
    "h20": GPU(148, 296, 96, 4000, 450, 50, 64),
    "h100": GPU(989, 1979, 80, 3350, 450, 50, 64),
    "h200": GPU(989, 1979, 141, 4800, 450, 50, 64),
    "b200": GPU(2250, 4500, 180, 8000, 900, 50, 64),
    # 72 GPUs of an NVL72 rack share NVLink; jobs of powers of two use 64 of them.
    "gb200": GPU(2500, 5000, 186, 8000, 900, 50, 450, node=64),
    "gb300": GPU(2500, 5000, 288, 8000, 900, 100, 450, node=64),
}
"""GPUs that a plan knows, by the name of `verl-mg plan --gpu`."""
DEFAULT_GPU = "h100"


def gpu(name: str) -> GPU:
    """Returns the data sheet of a GPU by its name in `GPUS`."""
    if name not in GPUS:
        raise UserError(f"--gpu: {name!r} is unknown. Use {', '.join(GPUS)}, or give figures with --measured FILE.")
    return GPUS[name]
