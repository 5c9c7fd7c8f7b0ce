"""Recorded metrics of the first iterations of every configuration of the small task.

python -m tests.recipes.golden RUNS [--renames FILE]      records them from folders RUNS/NAME with metrics.jsonl
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tools.compare_metrics import METRICS, Lines, read_metrics, read_renames

GOLDEN = Path(__file__).parent / "golden"
ITERATIONS = 2


@dataclass(frozen=True)
class Machine:
    """Versions that bitwise identical metrics need."""

    torch: str
    cpu: str

    @classmethod
    def here(cls) -> Machine:
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        return cls(torch.__version__, models[0].partition(":")[2].strip() if models else "unknown")


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
    for file in sorted(options.runs.glob(f"*/{METRICS}")):
        lines = [line for line in read_metrics(file, renames) if line["step"]][:ITERATIONS]
        Golden(Machine.here(), lines).write(file.parent.name)


if __name__ == "__main__":
    main()
