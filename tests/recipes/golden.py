"""Recorded metrics of the first iterations of every configuration of the small task.

python -m pytest tests/recipes/test_golden.py -m "nightly or not nightly" --basetemp=RUNS
python -m tests.recipes.golden RUNS [--renames FILE]      records them from the folders NAME below RUNS
"""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
import torch

from tools.compare_metrics import METRICS, Lines, read_metrics, read_renames

GOLDEN = Path(__file__).parent / "golden"
ITERATIONS = 2
CPU_INFO = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
HOLDING = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR",
           "MKL_DEBUG_CPU_TYPE", "OPENBLAS_CORETYPE")  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """All that decides how sums are rounded: only on equal machines are metrics bitwise equal.

    Makers of virtual machines call many processors by one name, and hide instructions that the processor has.
    """

    cpu: str
    """Vendor, family, model, stepping, and the sizes of the caches, by which libraries choose their blocks."""
    instructions: str
    """Sets of vector instructions that the kernel reports."""
    held: str
    """Variables that hold libraries to fewer of them."""
    capability: str
    """Instructions of torch's own kernels."""
    libraries: str
    """Versions of torch, oneDNN, MKL, numpy and its BLAS."""
    threads: int

    @classmethod
    def here(cls) -> Machine:
        fields = dict(re.findall(r"^(.+?)\s*: (.*)$", CPU_INFO.read_text().partition("\n\n")[0], re.MULTILINE))
        flags = fields.get("flags", "").split()
        caches = [file.read_text().strip() for file in sorted(CACHES.glob("index*/size"))]
        processor = ("vendor_id", "cpu family", "model", "stepping")
        return cls(
            cpu=" ".join([*(fields.get(name, "?") for name in processor), *caches]),
            instructions=" ".join(sorted(flag for flag in flags if re.match("avx|fma|amx|f16c", flag))),
            held=" ".join(f"{name}={os.environ[name]}" for name in HOLDING if name in os.environ),
            capability=torch.backends.cpu.get_cpu_capability(),
            libraries=", ".join(_versions()),
            threads=torch.get_num_threads(),
        )


def _versions() -> list[str]:
    blas = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]
    kernels = re.findall(r"(?:oneAPI Math Kernel|MKL-DNN|DNNL).*", torch.__config__.show())
    return [f"torch {torch.__version__}", *kernels, f"numpy {numpy.__version__}", f"{blas['name']} {blas['version']}"]


@dataclass(frozen=True)
class Golden:
    """Metrics of the first iterations of a run, and the machine that it ran on."""

    machine: Machine
    lines: Lines

    @classmethod
    def read(cls, name: str) -> Golden:
        tree = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
        return cls(Machine(**tree["machine"]), tree["lines"])

    def write(self, name: str) -> None:
        GOLDEN.mkdir(exist_ok=True)
        text = json.dumps(asdict(self), indent=1, sort_keys=True)
        (GOLDEN / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--renames", type=Path)
    options = parser.parse_args()
    renames = read_renames(options.renames) if options.renames else {}
    torch.set_num_threads(1)  # as in the ranks of tests
    for file in sorted(options.runs.rglob(METRICS)):
        lines = [line for line in read_metrics(file, renames) if line["step"]][:ITERATIONS]
        Golden(Machine.here(), lines).write(file.parent.name)


if __name__ == "__main__":
    main()
